"""One model's tokenizer: text to tokens and back, by the model's own files."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, ModelError, PacelineError, TextError, UnknownModel, one_line
from paceline.text.chat_template import TOOL_TEMPLATE, ChatTemplate, Message, Tool
from paceline.text.tool_calls.formats import ToolFormat, tool_format
from paceline.text.vocab.from_folder import vocabulary_from_folder
from paceline.text.vocab.from_gguf import vocabulary_from_gguf
from paceline.text.vocab.vocabulary import Vocabulary, literal


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """One line for every fault of the files. The tokenizers library raises bare exceptions, and panics."""
    try:
        yield
    except PacelineError:
        raise
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = one_line(error)
        raise CorruptModel(f"{path.name} describes no usable tokenizer ({reason}): fetch it again") from error


class Tokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._literal = literal(vocabulary.backend)
        self._pieces: dict[int, bytes] = {}
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.adds_bos = vocabulary.adds_bos and vocabulary.bos_id is not None
        self.eos_ids = vocabulary.eos_ids
        self.control = vocabulary.control  # never text: begin, end, turn marks
        self.added = vocabulary.added  # tokens matched whole in the text, special ones included
        self.strips_first_space = vocabulary.strips_first_space
        self.names = vocabulary.names  # bos_token, eos_token ...: variables of templates
        self.templates = vocabulary.templates  # by name

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a GGUF file, or from a folder with a tokenizer.json."""
        path = Path(path)
        with _readable(path):
            if not path.exists():
                raise UnknownModel(
                    f"no model at {path}: expected a GGUF file or a folder with a tokenizer.json"
                )
            vocabulary = vocabulary_from_folder(path) if path.is_dir() else vocabulary_from_gguf(path)
            tokenizer = cls(vocabulary)
            tokenizer.encode("a é\n\0")  # some errors occur only here
            return tokenizer

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """The text's tokens.

        special=True is for whole prompts: control tokens written in the text count as such, and a begin
        token comes first where the model wants one. special=False is for text from outside, or text that
        continues another: control tokens are plain characters, and there is no begin token. `bos` decides
        about the begin token alone; a model that wants none never gets one.
        """
        backend = self._backend if special else self._literal
        try:  # a batch, even of one, lets other threads run meanwhile
            ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            raise TextError("not valid Unicode text: expected a string without lone surrogates") from None
        begins = self.adds_bos and (special if bos is None else bos)
        return [self.bos_id, *ids] if begins and self.bos_id is not None else list(ids)

    def encode_whole(self, text: str) -> list[int]:
        """A text by itself, to be embedded: with the begin and end tokens that the model wants."""
        end = self._vocabulary.end_id
        return [*self.encode(text), *(() if end is None else (end,))]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The tokens' text; bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(self.shown(i, skip_special) for i in ids).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def piece(self, token: int) -> bytes:
        """The bytes of a token, which may be incomplete characters."""
        if token not in self._pieces:
            self._pieces[token] = self._vocabulary.piece(token)
        return self._pieces[token]

    def shown(self, token: int, skip_special: bool) -> bytes:
        """The token's bytes; none for a control token if those are skipped."""
        return b"" if skip_special and token in self._vocabulary.control else self.piece(token)

    @cached_property
    def longest_piece(self) -> int:
        """The number of bytes of the longest token."""
        return max(len(self._vocabulary.piece(token)) for token in range(self.vocab_size))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two models with the same vocabulary and the same merges."""
        model = json.loads(self._backend.to_str())["model"]
        ids = sorted((i, token) for token, i in self._backend.get_vocab().items())
        rules = model.get("merges") or model.get("vocab")
        return hashlib.sha256(json.dumps([ids, rules]).encode()).hexdigest()

    def to_json(self) -> str:
        """The tokenizer as JSON of the tokenizers library."""
        return self._backend.to_str()

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.templates, self.names)

    def override(self, chat_template: str | None = None, tool_format: ToolFormat | None = None) -> None:
        """Replaces what the model's files say. To be called before the first use.

        chat_template: its source. A template also decides the tool format, unless that is given too.
        """
        if chat_template is not None:
            self.templates = {"default": chat_template}
        if tool_format is not None:
            self.tool_format = tool_format

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format in which the model writes tool calls."""
        return tool_format(self.templates.get(TOOL_TEMPLATE, self.templates.get("default")))

    @cached_property
    def tool_marks(self) -> frozenset[int]:
        """Control tokens that are part of the syntax of tool calls, and so must not be skipped."""
        form = self.tool_format
        syntax = (form.trigger, form.begin, form.end, *form.other_triggers, *form.other_marks)
        texts = ((token, self.piece(token).decode(errors="replace")) for token in self._vocabulary.control)
        return frozenset(token for token, mark in texts if mark and any(mark in s for s in syntax))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as one text, which the model continues.

        continue_final_message: at the end of the final message, which then needs no generation prompt.
        """
        if continue_final_message:
            return self.template.render_open(messages, tools, variables)
        return self.template.render(messages, tools, add_generation_prompt, variables)

    def generation_prompt(
        self,
        rendered: str,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        /,
        **variables: Any,
    ) -> str:
        """The end of a rendered conversation, which the template adds for the model to continue."""
        return self.template.generation_prompt(rendered, messages, tools, variables)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The tokens of the rendered conversation. The template writes the begin token itself, if any."""
        text = self.render(messages, tools, add_generation_prompt, continue_final_message, **variables)
        return self.encode(text, bos=False)
