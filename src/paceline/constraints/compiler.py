"""From a constraint to a cursor, for one model's tokenizer. Compiled grammars and refusals are cached.

Small grammars are compiled at once, under limits that keep them to a fraction of a second. Those that are
large or exceed these limits are compiled in another process first (sandbox.py).
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from paceline.constraints.cursor import Grammar, GrammarCursor, lower_priority
from paceline.constraints.explain import explain
from paceline.constraints.forced_text import NO_FORCING
from paceline.constraints.grammars import (
    LARK_COMMENT,
    PARAM_COMMENT,
    Constraint,
    StructuralTag,
    UnmarkedCalls,
    quoted,
)
from paceline.constraints.sandbox import AcceptedGrammars, Sandbox, SandboxSetup
from paceline.constraints.sandbox_process import compile_grammar as compiled
from paceline.constraints.tool_call_openings import ToolCallOpenings
from paceline.constraints.trigger_cursor import Openings, Trigger, TriggerCursor
from paceline.errors import ConstraintError
from paceline.text import Tokenizer
from paceline.types import Cursor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

K = TypeVar("K")

MAX_CACHED: Final = 256  # compiled grammars
MAX_CACHED_BYTES: Final = 128 << 20  # that they take, by estimate
MAX_REFUSED: Final = 1024  # grammars whose refusal is remembered
MAX_CHECKED: Final = 32 << 10  # bytes of a text that a checker reads, some 50 ms on a server's event loop
MAX_SMALL: Final = 4096  # bytes of a grammar that is compiled at once
TRIGGER_BYTES: Final = 256 << 10  # its masks, by estimate
BYTES_PER_CHARACTER: Final = 64  # of a compiled grammar, for each character of its text
_LINE: Final = re.compile(r"(?:at )?(\d+)\(\d+\): ")  # how a message begins: line and column
_LIMIT: Final = re.compile(r"too (big|many|large)|fuel|limit|precomputation|fixed text", re.IGNORECASE)
# Work that one grammar may cause: a hostile one ends with an error instead of delaying other requests.
LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
}
SMALL_LIMITS: Final = {"initial_lexer_fuel": 100_000, "max_grammar_size": 20_000}  # of a small grammar


LARK_LIMITS: Final = {"max_items_in_row": 1000}  # of one that may be ambiguous: a row costs the square


def _limits(rules: str, small: bool = False) -> dict[str, int]:
    """llguidance's, for a grammar."""
    tighter = (SMALL_LIMITS if small else {}) | (LARK_LIMITS if LARK_COMMENT in rules else {})
    return {name: min(limit, tighter.get(name, limit)) for name, limit in LIMITS.items()}


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one constraint may cost. `EngineConfig` has the same settings."""

    seconds: float = 3.0  # of CPU time to compile it
    memory_mb: int = 256
    forced_bytes: int = 8192  # of fixed text in a row


V = TypeVar("V")


class _LruCache(Generic[K, V]):
    """Least recently used values go first, beyond a number of values and of bytes. Sizes may change."""

    def __init__(self, max_values: int, max_bytes: int, size: Callable[[V], int]) -> None:
        self._max_values, self._max_bytes, self._size = max_values, max_bytes, size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            value = self._values.setdefault(key, value)
            total = sum(map(self._size, self._values.values()))
            while len(self._values) > 1 and (len(self._values) > self._max_values or total > self._max_bytes):
                total -= self._size(self._values.popitem(last=False)[1])
        return value


class Compiler:
    """Makes cursors. The tokenizer's tables are built for the first constraint."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        limits: GrammarLimits | None = None,
        folder: Path | None = None,
    ) -> None:
        """folder: remembers which large grammars could be compiled, for later processes."""
        self._folder = folder
        self._tokenizer = tokenizer
        self._vocab = vocab_size  # rows of the model's output, which may have more than the tokenizer
        self._limits = limits or GrammarLimits()
        self._grammars: _LruCache[str, Grammar] = _LruCache(
            MAX_CACHED, MAX_CACHED_BYTES, lambda grammar: grammar.size
        )
        self._triggers: _LruCache[tuple[str, StructuralTag], tuple[Trigger, Openings | None]] = _LruCache(
            MAX_CACHED, MAX_CACHED_BYTES, lambda _: TRIGGER_BYTES
        )
        self._refused: OrderedDict[bytes, ConstraintError] = OrderedDict()  # by the grammar's digest
        self._with_byte: dict[bytes, list[int]] = {}  # tokens whose text has a byte

    def cursor(self, constraint: Constraint | StructuralTag, ignore_eos: bool = False) -> Cursor:
        """A cursor at the start of an output. ignore_eos: an end token does not end its free text."""
        if isinstance(constraint, StructuralTag):
            trigger, openings = self._trigger(constraint)
            return TriggerCursor(trigger, ignore_eos, openings)
        return GrammarCursor(self._grammar(constraint))

    def load(self) -> None:
        """Builds the tokenizer's tables, which stops all threads for a moment: before a server starts.

        Begins to start the sandbox, too: the first request with tools shall wait for neither.
        """
        _ = self._tables, self._with(":"), self._with(self._tokenizer.tool_format.trigger[-1:])
        self._sandbox.start()

    def checker(self, constraint: Constraint) -> Callable[[str], bool]:
        """Tells whether a whole text fits; none beyond MAX_CHECKED does. The grammar is compiled here."""
        grammar = self._grammar(constraint)

        def fits(text: str) -> bool:
            written = text.encode("utf-8", "surrogatepass")
            if len(written) > MAX_CHECKED:
                return False
            return GrammarCursor(grammar).completed_by(self._tables.tokenize_bytes(written))

        return fits

    def _grammar(self, constraint: Constraint) -> Grammar:
        rules = constraint.rules("start", self.spell)
        return self._grammars.get(rules, lambda: self._new_grammar(rules))

    def _new_grammar(self, rules: str) -> Grammar:
        digest = hashlib.sha256(rules.encode("utf-8", "surrogatepass")).digest()
        if (known := self._refused.get(digest)) is not None:
            raise ConstraintError(known.reason, known.param)
        try:
            return self._compile(rules)
        except ConstraintError as error:
            self._refused[digest] = error
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
            raise

    def _compile(self, rules: str) -> Grammar:
        tables, size, forces = self._tables, BYTES_PER_CHARACTER * len(rules), NO_FORCING not in rules
        if len(rules) <= MAX_SMALL:
            small = _limits(rules, small=True)
            forced = self._limits.forced_bytes if forces else None
            try:
                return Grammar(lambda: compile_grammar(rules, tables, small, forced), tables, size, forces)
            except _LimitReached:
                pass  # it may still be within the limits of a large one
        limits = _limits(rules)
        error, taken = self._sandbox.compile(rules, limits, forces)
        if error is not None:
            raise _error(error, rules)
        make = partial(compile_grammar, rules, tables, limits, None)
        with ThreadPoolExecutor(1, "paceline-compile", lower_priority) as pool:
            return pool.submit(Grammar, make, tables, max(size, taken), forces).result()

    @cached_property
    def _sandbox(self) -> Sandbox:
        limits = self._limits
        return Sandbox(
            SandboxSetup(
                self._description,
                self._vocab,
                sorted(self._tokenizer.eos_ids),
                limits.forced_bytes,
                limits.seconds,
                limits.memory_mb << 20,
            ),
            None if self._folder is None else AcceptedGrammars(self._folder),
        )

    def _trigger(self, tag: StructuralTag) -> tuple[Trigger, Openings | None]:
        grammar = "" if tag.then is None else tag.then.rules("start", self.spell)
        return self._triggers.get((grammar, tag), lambda: self._new_trigger(tag))

    def _new_trigger(self, tag: StructuralTag) -> tuple[Trigger, Openings | None]:
        grammar = None if tag.then is None else self._grammar(tag.then)
        trigger = Trigger(
            tag.trigger.encode(),
            self._pieces,
            partial(self._start, grammar),
            tag.again,
            tag.anywhere,
            self._tokenizer.eos_ids,
            self._with(tag.trigger[-1:]),
            tag.must,
        )
        return trigger, None if tag.unmarked is None else self._openings(tag.unmarked)

    def _openings(self, calls: UnmarkedCalls) -> Openings | None:
        try:
            grammar = self._grammar(calls)
        except ConstraintError:  # too large: calls with the trigger are still enforced
            return None
        return Openings(
            ToolCallOpenings(calls.schemas), self._pieces, partial(self._start, grammar), self._with(":")
        )

    def _start(self, grammar: Grammar | None, written: bytes, quick: bool) -> Cursor | None:
        """A cursor after the text with which a grammar begins, if it accepts that. quick: never compiles."""
        if grammar is None:
            return None
        cursor = GrammarCursor(grammar, compiles=not quick)
        consume = cursor.commit if quick else cursor.advance
        return cursor if all(consume(token) for token in self._tokens(written)) else None

    def _tokens(self, written: bytes) -> list[int]:
        """Of text as `spell` gives it to a grammar: special tokens as such."""
        tokens: list[int] = []
        for part in self._marks.split(written):
            mark = self._ids.get(part)
            tokens += [mark] if mark is not None else self._tables.tokenize_bytes(part) if part else []
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Special tokens by their text."""
        return {piece: token for token in self._tokenizer.added if (piece := self._tokenizer.piece(token))}

    @cached_property
    def _marks(self) -> re.Pattern[bytes]:
        return re.compile(b"(" + b"|".join(map(re.escape, self._ids)) + b")" if self._ids else b"(?!)")

    def spell(self, text: str) -> str:
        """Fixed text as items of a rule: special tokens as single tokens, the rest as strings."""
        items, plain = [], b""
        for token in self._tokenizer.encode(text, special=True, bos=False):
            if token in self._tokenizer.added:
                items += [quoted(plain.decode())] if plain else []
                items.append(f"<[{token}]>")
                plain = b""
            else:
                plain += self._tokenizer.piece(token)
        items += [quoted(plain.decode())] if plain else []
        return " ".join(items) or '""'

    @cached_property
    def _description(self) -> str:
        return _for_grammars(self._tokenizer.to_json())

    @cached_property
    def _pieces(self) -> list[bytes]:
        pieces = [self._tokenizer.piece(token) for token in range(self._tokenizer.vocab_size)]
        return pieces + [b""] * (self._vocab - len(pieces))

    def _with(self, end: str) -> list[int]:
        """Tokens that may complete a text with this last character: those with its last byte."""
        last = end.encode()[-1:]
        if last not in self._with_byte:
            self._with_byte[last] = [token for token, piece in enumerate(self._pieces) if last in piece]
        return self._with_byte[last]

    @cached_property
    def _tables(self) -> "LLTokenizer":
        tables: LLTokenizer = _library().LLTokenizer(
            self._description,
            n_vocab=self._vocab,
            eos_token=sorted(self._tokenizer.eos_ids),
        )
        return tables


def check(constraint: Constraint) -> None:
    """Raises if the constraint cannot be enforced, whatever the model."""
    byte_matcher(constraint)


def byte_matcher(constraint: Constraint) -> "LLMatcher":
    """A matcher whose tokens are the text's bytes."""
    return compile_grammar(constraint.rules("start", quoted), _library().LLTokenizer("byte"))


class _LimitReached(ConstraintError):
    """The grammar may be valid, but costs more than the limits allow."""


def compile_grammar(
    grammar: str,
    tables: "LLTokenizer",
    limits: Mapping[str, int] | None = None,
    max_forced: int | None = None,
) -> "LLMatcher":
    """A matcher at the start of the grammar; every output gets a copy.

    max_forced: bytes of fixed text at its start. None: any number.
    """
    matcher, error = compiled(_library(), tables, grammar, dict(limits or LIMITS), max_forced)
    if error is not None:
        raise _error(error, grammar)
    return matcher  # type: ignore[no-any-return]


def _error(message: str, grammar: str) -> ConstraintError:
    """Names the part of the request that the line comes from which the engine could not compile."""
    number = _LINE.match(message)
    lines = grammar.split("\n")[: int(number[1]) if number else None]
    params = [line.removeprefix(PARAM_COMMENT) for line in lines if line.startswith(PARAM_COMMENT)]
    param = params[-1] if (number and params) or len(params) == 1 else None
    schema = lines[-1].partition(": %json ")[2]
    kind = _LimitReached if _LIMIT.search(message.partition("\n")[0]) else ConstraintError
    try:
        return kind(f"cannot be enforced: {explain(message, json.loads(schema))}", param)
    except ValueError:  # the line holds no schema, or a part of one
        return kind(f"cannot be enforced: {explain(message)}", param)


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise ConstraintError("constraints need the package llguidance: pip install llguidance") from None
    return llguidance


def _for_grammars(tokenizer: str) -> str:
    """The tokenizer's description, changed so that the tokens of a grammar's text always write that text.

    No Unicode normalisation, and special tokens get names that no text holds: text that looks like one is
    written as text.
    """
    description: dict[str, Any] = json.loads(tokenizer)
    if (description.get("normalizer") or {}).get("type") in ("NFC", "NFKC"):
        description["normalizer"] = None
    vocab = description["model"]["vocab"]
    for token in description["added_tokens"]:
        content, name = token["content"], f"\ufdd0{token['id']}\ufdd1"
        mark = token["special"] or (content.startswith("<") and content.endswith(">"))
        if mark and isinstance(vocab, dict):
            if content in vocab:
                vocab[name] = vocab.pop(content)
            token |= {"content": name, "special": True}
    return json.dumps(description, ensure_ascii=False)
