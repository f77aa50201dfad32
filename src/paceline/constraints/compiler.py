"""From a constraint to a cursor, for one model's tokenizer. Compiled grammars are cached."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from paceline.constraints.call_heads import CallHeads
from paceline.constraints.cursor import Grammar, GrammarCursor
from paceline.constraints.explain import explain
from paceline.constraints.grammars import PARAM_COMMENT, Constraint, StructuralTag, UnmarkedCalls, quoted
from paceline.constraints.trigger_cursor import Heads, Trigger, TriggerCursor
from paceline.errors import ConstraintError
from paceline.text import Tokenizer
from paceline.types import Cursor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

K = TypeVar("K")
V = TypeVar("V")

MAX_CACHED: Final = 256  # compiled grammars
MAX_CACHED_BYTES: Final = 16 << 20  # of their texts
_LINE: Final = re.compile(r"(?:at )?(\d+)\(\d+\): ")  # how a message begins: line and column
# Work that one grammar may cause: a hostile one ends with an error instead of delaying other requests.
LIMITS: Final = {
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
}


class _LruCache(Generic[K, V]):
    """Least recently used values go first, beyond a number of values and of bytes."""

    def __init__(self, max_values: int, max_bytes: int) -> None:
        self._max_values, self._max_bytes = max_values, max_bytes
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K, size: int, make: Callable[[], V]) -> V:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value, size
                self._bytes += size
            while len(self._values) > 1 and (
                len(self._values) > self._max_values or self._bytes > self._max_bytes
            ):
                self._bytes -= self._values.popitem(last=False)[1][1]
        return value


class Compiler:
    """Makes cursors. The tokenizer's tables are built for the first constraint."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size  # rows of the model's output, which may have more than the tokenizer
        self._grammars: _LruCache[str, Grammar] = _LruCache(MAX_CACHED, MAX_CACHED_BYTES)
        self._triggers: _LruCache[tuple[str, StructuralTag], tuple[Trigger, Heads | None]] = _LruCache(
            MAX_CACHED, MAX_CACHED_BYTES
        )

    def cursor(self, constraint: Constraint | StructuralTag, ignore_eos: bool = False) -> Cursor:
        """A cursor at the start of an output. ignore_eos: an end token does not end its free text."""
        if isinstance(constraint, StructuralTag):
            trigger, heads = self._trigger(constraint)
            return TriggerCursor(trigger, ignore_eos, heads)
        return GrammarCursor(self._grammar(constraint))

    def checker(self, constraint: Constraint) -> Callable[[str], bool]:
        """Tells whether a whole text fits. The grammar is compiled here, not when a text is checked."""
        grammar = self._grammar(constraint)

        def fits(text: str) -> bool:
            cursor = GrammarCursor(grammar)
            tokens = self._tables.tokenize_bytes(text.encode("utf-8", "surrogatepass"))
            whole = all(cursor.advance(token) for token in tokens)
            return whole and (cursor.finished or cursor.advance(min(self._tokenizer.eos_ids)))

        return fits

    def _grammar(self, constraint: Constraint) -> Grammar:
        rules = constraint.rules("start", self.spell)
        return self._grammars.get(
            rules,
            len(rules),
            lambda: Grammar(lambda: compile_grammar(rules, self._tables), self._tables),
        )

    def _trigger(self, tag: StructuralTag) -> tuple[Trigger, Heads | None]:
        grammar = "" if tag.then is None else tag.then.rules("start", self.spell)
        return self._triggers.get((grammar, tag), len(grammar), lambda: self._new_trigger(tag))

    def _new_trigger(self, tag: StructuralTag) -> tuple[Trigger, Heads | None]:
        grammar = None if tag.then is None else self._grammar(tag.then)
        trigger = Trigger(
            tag.trigger.encode(),
            self._pieces,
            partial(self._start, grammar),
            tag.again,
            tag.anywhere,
            self._tokenizer.eos_ids,
            tag.must,
        )
        return trigger, None if tag.unmarked is None else self._heads(tag.unmarked)

    def _heads(self, calls: UnmarkedCalls) -> Heads | None:
        try:
            grammar = self._grammar(calls)
        except ConstraintError:  # too large: calls with the trigger are still enforced
            return None
        return Heads(CallHeads(calls.schemas), self._pieces, partial(self._start, grammar), self._with_colon)

    def _start(self, grammar: Grammar | None, written: bytes) -> Cursor | None:
        """A cursor after the text with which a grammar begins, if it accepts that."""
        if grammar is None:
            return None
        cursor = GrammarCursor(grammar)
        consumed = self._tables.tokenize_bytes(written) if written else []
        return cursor if all(cursor.advance(token) for token in consumed) else None

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
    def _pieces(self) -> list[bytes]:
        pieces = [self._tokenizer.piece(token) for token in range(self._tokenizer.vocab_size)]
        return pieces + [b""] * (self._vocab - len(pieces))

    @cached_property
    def _with_colon(self) -> list[int]:
        """Tokens that may complete the head of a call."""
        return [token for token, piece in enumerate(self._pieces) if b":" in piece]

    @cached_property
    def _tables(self) -> "LLTokenizer":
        tables: LLTokenizer = _library().LLTokenizer(
            _for_grammars(self._tokenizer.to_json()),
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


def compile_grammar(grammar: str, tables: "LLTokenizer") -> "LLMatcher":
    """A matcher at the start of the grammar; every output gets a copy."""
    library = _library()
    limits = library.LLParserLimits(verbose_errors=False, **LIMITS)
    matcher: LLMatcher = library.LLMatcher(tables, grammar, log_level=0, limits=limits)
    if not matcher.is_error():  # a grammar that no text fits fails only when its first mask is computed
        first = matcher.deep_copy()
        first.compute_bitmask()
        matcher = first if first.is_error() else matcher
    if matcher.is_error():
        raise _error(matcher.get_error(), grammar)
    return matcher


def _error(message: str, grammar: str) -> ConstraintError:
    """Names the part of the request that the line comes from which the engine could not compile."""
    number = _LINE.match(message)
    lines = grammar.split("\n")[: int(number[1]) if number else None]
    params = [line.removeprefix(PARAM_COMMENT) for line in lines if line.startswith(PARAM_COMMENT)]
    param = params[-1] if (number and params) or len(params) == 1 else None
    schema = lines[-1].partition(": %json ")[2]
    try:
        return ConstraintError(f"cannot be enforced: {explain(message, json.loads(schema))}", param)
    except ValueError:  # the line holds no schema, or a part of one
        return ConstraintError(f"cannot be enforced: {explain(message)}", param)


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
