"""A file of models for one server (YAML or JSON), each with settings of its own.

    models:
      - model: smollm2-135m
        name: small
        aliases: [gpt-4o-mini]
      - model: qwen2.5-coder-1.5b
        drafters: [suffix, ngram]
        cache_mb: 2048

The first is the default. What an entry leaves out is as the command line says.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from paceline.config import EngineConfig
from paceline.errors import SettingError
from paceline.server.launch import ModelSettings, default_name
from paceline.web.config_file import ConfigFileError, StrictModel, checked, expected, read


class ModelsFileError(ConfigFileError):
    """Lists every problem of a file of models."""


def _not_empty(name: str) -> str:
    if not name:
        raise expected("a name that is not empty")
    return name


_Name = Annotated[str, AfterValidator(_not_empty)]


class _Entry(StrictModel):
    model: str
    name: _Name | None = None
    aliases: tuple[_Name, ...] = ()
    draft_model: str | None = None
    trained: tuple[str, ...] | None = None
    drafters: tuple[str, ...] | None = None
    max_draft: int | None = None
    chat_template: str | None = None
    tool_format: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    cache_mb: int | None = None
    max_model_len: int | None = None


class _File(StrictModel):
    models: tuple[_Entry, ...]


_ENGINE = ("device", "dtype", "threads", "cache_mb", "max_model_len")


def read_models(path: Path | str, defaults: ModelSettings) -> list[ModelSettings]:
    """In the order of the file. defaults: for what an entry leaves out; its model and names are not used."""
    path = Path(path)
    entries = checked(_File, read(path, ModelsFileError), ModelsFileError).models
    if not entries:
        raise ModelsFileError(f"{path.name} has no models: expected one at least")
    return [_settings(i, entry, defaults) for i, entry in enumerate(entries)]


def _settings(i: int, entry: _Entry, defaults: ModelSettings) -> ModelSettings:
    given: Mapping[str, Any] = entry.model_dump(exclude_none=True, exclude={"name", "aliases"})
    own = {name: value for name, value in given.items() if name not in _ENGINE}
    try:
        engine: EngineConfig = replace(
            defaults.engine, **{name: value for name, value in given.items() if name in _ENGINE}
        )
        names = (entry.name or default_name(entry.model), *entry.aliases)
        return replace(defaults, **own, served_model_name=names, engine=engine)
    except SettingError as error:
        raise ModelsFileError(f"models[{i}].{error}") from None
