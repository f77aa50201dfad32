"""The call of `vllm serve` for a route."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from paceline.config import require_min
from paceline.vllm.proposer import CLASS, KEY, ProposerSettings

PerRequest = Literal["none", "summary", "detailed"]
METHOD: Final = "custom_class"
EXTRACT: Final = "extract_hidden_states"
SPECULATION: Final = ("per_request_spec_decode_metrics", "proposer", "hidden_states")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Options of `vllm serve`, by vLLM's names; None: vLLM's own default."""

    port: int | None = None
    served_model_name: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    enforce_eager: bool | None = None
    # Figures of speculation in each response, which the gate reads.
    per_request_spec_decode_metrics: PerRequest = "summary"
    proposer: ProposerSettings = field(default_factory=ProposerSettings)
    hidden_states: str = ""  # the folder of their files, where the method extracts them

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size")
        given = [name for name in (*sizes, "data_parallel_size") if getattr(self, name) is not None]
        require_min(self, **dict.fromkeys(given, 1))

    def flags(self) -> list[str]:
        """Of all but speculation."""
        flags: list[str] = []
        for name in (f.name for f in fields(self) if f.name not in SPECULATION):
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is True:
                flags.append(option)
            elif value not in (None, False):
                flags += [option, str(value)]
        return flags


def proposer_config(max_draft: int) -> dict[str, Any]:
    """`--speculative-config` for paceline's own drafters inside vLLM."""
    return {"method": METHOD, "model": CLASS, "num_speculative_tokens": max_draft}


def extraction_config(layers: Sequence[int]) -> dict[str, Any]:
    """`--speculative-config` for hidden states in place of drafts. layers: n is the output of the n-th."""
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {"method": EXTRACT, "num_speculative_tokens": 1, "draft_model_config": draft}


def serve_command(
    model: str,
    speculative_config: Mapping[str, Any] | None = None,
    settings: ServeSettings | None = None,
) -> list[str]:
    """speculative_config: None for plain decoding. `settings.proposer` counts where it is paceline's own."""
    settings = settings or ServeSettings()
    command = ["vllm", "serve", model, *settings.flags()]
    if speculative_config is None:
        return command
    command += ["--speculative-config", json.dumps(speculative_config)]
    if speculative_config.get("method") == EXTRACT:
        return [*command, "--kv-transfer-config", json.dumps(_connector(settings.hidden_states))]
    if speculative_config.get("method") == METHOD and (changed := settings.proposer.changed()):
        command += ["--additional-config", json.dumps({KEY: changed})]
    if settings.per_request_spec_decode_metrics != "none":
        command += ["--per-request-spec-decode-metrics", settings.per_request_spec_decode_metrics]
    return command


def _connector(folder: str) -> dict[str, Any]:
    return {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "paceline.vllm.hidden_states_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
