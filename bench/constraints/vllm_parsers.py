"""vLLM's tool parsers from their source files, without vLLM: what they import is replaced by stubs.

Only `extract_tool_calls`, which reads a whole answer, is used; of the stubs it needs little more than classes
that hold their arguments.
"""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from paceline.text import ToolCall

# By vLLM's names: the file and the class of each.
PARSERS: Final = {
    "hermes": ("hermes_tool_parser.py", "Hermes2ProToolParser"),
    "llama3_json": ("llama_tool_parser.py", "Llama3JsonToolParser"),
    "xlam": ("xlam_tool_parser.py", "xLAMToolParser"),
}
_STUBBED: Final = ("vllm", "partial_json_parser", "transformers")


class _ToolParser:
    def __init__(self, tokenizer: object, tools: object = None) -> None:
        self.model_tokenizer, self.tools = tokenizer, tools
        self.vocab = {"<|python_tag|>": 0}


_KNOWN: Final[dict[str, Any]] = {
    "ToolParser": _ToolParser,
    "init_logger": logging.getLogger,
    "is_mistral_tokenizer": lambda tokenizer: False,
    "make_tool_call_id": lambda **_: "",
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS": 1,
}


class _Stub(ModuleType):
    """Has every name: known ones, else a class whose instances hold what they are made with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package: it has submodules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _KNOWN.get(name) or type(name, (SimpleNamespace,), {})


class _Stubs(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname.split(".")[0] in _STUBBED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


@contextmanager
def _stubbed() -> Iterator[None]:
    before, stubs = dict(sys.modules), _Stubs()
    for name in [name for name in sys.modules if name.split(".")[0] in _STUBBED]:
        del sys.modules[name]
    sys.meta_path.insert(0, stubs)
    try:
        yield
    finally:
        sys.meta_path.remove(stubs)
        for name in [name for name in sys.modules if name.split(".")[0] in _STUBBED]:
            del sys.modules[name]
        sys.modules.update(before)


class VllmParser:
    """folder: vllm/tool_parsers of a checkout."""

    def __init__(self, folder: Path, name: str) -> None:
        file, class_ = PARSERS[name]
        with _stubbed():
            spec = spec_from_file_location(f"vllm_{name}", folder / file)
            assert spec is not None
            assert isinstance(spec.loader, SourceFileLoader)
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        self._parser = getattr(module, class_)(tokenizer=SimpleNamespace())

    def calls(self, text: str) -> Sequence[ToolCall]:
        logging.disable()  # it logs a traceback for every text that it cannot read
        try:
            found = self._parser.extract_tool_calls(text, SimpleNamespace())
        finally:
            logging.disable(logging.NOTSET)
        called = [call.function for call in found.tool_calls]
        return [ToolCall(c.name, json.loads(c.arguments)) for c in called]
