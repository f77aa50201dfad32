"""Builds a tokenizer from a Hugging Face folder: tokenizer.json and the small files beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from paceline.errors import CorruptModel, ModelError, TextError
from paceline.text.vocab.vocabulary import Spelling, Vocabulary, end_tokens

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def vocabulary_from_folder(folder: Path) -> Vocabulary:
    backend = _backend(folder / "tokenizer.json")
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    names = {n: text for n in _NAMES if (text := _content(config.get(n)))}
    added = backend.get_added_tokens_decoder()
    control = frozenset(i for i, token in added.items() if token.special)
    spelling, strips = _spelling(folder, backend)
    bos_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    eos_id = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return Vocabulary(
        backend=backend,
        spelling=spelling,
        size=max(backend.get_vocab().values()) + 1,
        control=control,
        added=frozenset(added),
        bos_id=bos_id,
        adds_bos=_adds_bos(backend, config, bos_id),
        eos_ids=end_tokens(backend, control, (eos_id, *_stated_ends(folder))),
        strips_first_space=strips,
        names=names,
        templates=_templates(folder, config),
        end_id=_end_id(backend, config, bos_id, eos_id),
    )


def _backend(file: Path) -> Backend:
    if not file.is_file():
        raise TextError(f"{file.parent} has no tokenizer.json: expected a folder saved with its tokenizer")
    data = file.read_bytes()
    try:
        backend = Backend.from_buffer(data)
    except Exception as problem:  # the library raises bare exceptions
        raise CorruptModel(f"{file} is damaged ({problem}): fetch it again") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError.unreadable(file, error) from error
    except ValueError as problem:
        raise CorruptModel(f"{file} is damaged ({problem}): fetch it again") from None
    if not isinstance(data, dict):
        raise CorruptModel(f"{file} is damaged (it holds no JSON object): fetch it again")
    return data


def _content(token: Any) -> str | None:
    """A special token is written as its text, or as an object with the text under `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _spelling(folder: Path, backend: Backend) -> tuple[Spelling, bool]:
    """The spelling of tokens, and whether decoding drops a first space: both from the decoder."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte-level", False
    if "Metaspace" in kinds:
        return "sentencepiece", steps[0].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return "sentencepiece", any(s.get("type") == "Strip" and s.get("start") for s in steps)
    raise TextError(
        f"{folder} decodes with {sorted(map(str, kinds))}: known are ByteLevel, ByteFallback, Metaspace"
    )


def _adds_bos(backend: Backend, config: Mapping[str, Any], bos_id: int | None) -> bool:
    if "add_bos_token" in config:
        return bool(config["add_bos_token"])
    return bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _end_id(
    backend: Backend, config: Mapping[str, Any], bos_id: int | None, eos_id: int | None
) -> int | None:
    if "add_eos_token" in config:
        return eos_id if config["add_eos_token"] else None
    ids = backend.encode("", add_special_tokens=True).ids
    return ids[-1] if ids and ids[-1] != bos_id else None


def _stated_ends(folder: Path) -> list[int]:
    ends = _json(folder / "generation_config.json").get("eos_token_id")
    return ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else []


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stated = config.get("chat_template")
    if isinstance(stated, list):  # several by name, such as default and tool_use
        templates = {str(t["name"]): str(t["template"]) for t in stated}
    else:
        templates = {"default": stated} if isinstance(stated, str) else {}
    file = folder / "chat_template.jinja"
    return templates | ({"default": file.read_text(encoding="utf-8")} if file.is_file() else {})
