"""vLLM's own hidden states, as files to train on, on CPUs too.

vLLM's method `extract_hidden_states` keeps the outputs of chosen layers in a cache of its own, and its
connector `ExampleHiddenStatesConnector` writes them to a safetensors file for each request. That connector
copies through CUDA streams, which a CPU does not have: this one writes at once there, and is vLLM's own
elsewhere. Imported by vLLM alone.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes a file for requests with `kv_transfer_params: {"hidden_states": true}`, and for no others."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            extra = getattr(request.sampling_params, "extra_args", None) or {}
            if not (extra.get("kv_transfer_params") or {}).get("hidden_states"):
                meta.new_req_filenames.pop(request.req_id)
                self._request_filenames.pop(request.req_id)  # without one nothing is saved
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns the layers that the file has, besides its path."""
        delayed, params = super().request_finished(request, block_ids)
        if params is not None:
            config = self._vllm_config.speculative_config.draft_model_config.hf_config
            params["layers"] = list(config.eagle_aux_hidden_state_layer_ids)
        return delayed, params

    def _submit_async_write(self, pending: Any) -> None:
        """Writes the file of a request that has ended, then unlocks it. One rank does it for all."""
        if not self._is_tp_rank_zero:
            return
        cache = self._kv_cache  # [blocks, layers, tokens of a block, width]
        if cache is None or cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        rows = extract_from_kv_cache(cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id, None)
        try:
            os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
            tensors = {"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}
            save_file(tensors, pending.filename)
        finally:
            if lock is not None:
                os.close(lock)  # releases the reader
        self._req_copy_events[pending.req_id] = _WRITTEN


class _Written:
    """In place of the CUDA event of a copy."""

    def query(self) -> bool:
        return True


_WRITTEN = _Written()
