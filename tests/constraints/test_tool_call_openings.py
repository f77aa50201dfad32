"""Calls that begin without a mark: found in free text, and then enforced like those with one."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints import Compiler, OutputSpec, StructuralTag, ToolSchemas
from paceline.constraints.draft_masks import masks, words
from paceline.constraints.tool_call_openings import OpeningState, ToolCallOpenings
from paceline.constraints.trigger_cursor import Nesting
from paceline.text import FORMATS, CallDelta, ToolStream, parse_tool_calls
from paceline.types import ROOT, Cursor, Draft
from support import examples
from support.cursors import after, allowed, row_of, tokenizer_with
from support.tools import cuts, pieces

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}},
]
EXTRA = [
    '": {"',
    '":{}',
    '": {}',
    '":[',
    '": "',
    '"name',
    '": "get',
    "{{",
    "```",
    "json\n",
    '", "',
    "\n{",
    "}\n",
    "}```",
    "},\n",
    "}]",
    "}x",
]
TOKENIZER = tokenizer_with(EXTRA)
VOCAB = TOKENIZER.vocab_size
ID = {TOKENIZER.piece(token).decode("latin-1"): token for token in range(VOCAB)}
(END,) = TOKENIZER.eos_ids
COMPILER = Compiler(TOKENIZER, VOCAB)
HERMES = FORMATS["hermes"]
SPEC = OutputSpec(TOOLS)
AUTO = SPEC.constraint(HERMES)
HEAD = '{"name": "get_weather", "arguments":'
CALL = HEAD + ' {"city": "Paris"}}'


def letters(text: str) -> list[int]:
    return list(text.encode())


def free(cursor: Cursor) -> bool:
    return len(allowed(cursor, VOCAB)) == VOCAB


def offered(compiler: Compiler = COMPILER, spec: OutputSpec = SPEC) -> ToolSchemas:
    assert spec.unmarked_calls is not None
    return ToolSchemas(spec.unmarked_calls.schemas, compiler.checker(spec.unmarked_calls), enforced=True)


@pytest.mark.parametrize(
    "before",
    [
        "",
        "\n ",
        "Sure.\n",
        "Sure:\n\n```json\n",
        "```\n",
        "```tool_call \n ",
        "[",
        "```json\n[\n",
        "```js\n{\n```\n",
    ],
)
def test_a_head_where_calls_are_looked_for_begins_a_grammar(before: str) -> None:
    assert AUTO is not None
    cursor = after(COMPILER, AUTO, letters(before + HEAD[:-1]))
    assert cursor.advance(ord(":"))
    assert {chr(t) for t in allowed(cursor, VOCAB) if t < 128} == set(" \t\r\n{")
    for token in letters(' {"'):
        assert cursor.advance(token)
    assert {chr(t) for t in allowed(cursor, VOCAB) if t < 128} == {"c"}
    for token in letters('city": "Paris"}}'):
        assert cursor.advance(token)
    assert not cursor.finished
    assert free(cursor)
    assert cursor.advance(END)
    assert cursor.finished


@pytest.mark.parametrize(
    "text",
    [
        f"Use {HEAD} {{}}",
        f"- {HEAD} []",
        f"```js\n{HEAD} []",
        f"```js\nx\n{HEAD} []",
        f"```\nx\n{HEAD} []",
        f"```\n```{HEAD} []",
        f"x {{\n}} {HEAD} []",
        '{"name": "get_time", "arguments": []',
        '{"name": "get_weather2", "arguments": []',
        '{"name": "get_weather", "argument": []',
        '{"name": "get_weather", "description": "x", "parameters": []',
        '{"names": "get_weather", "arguments": []',
    ],
)
def test_other_text_stays_free(text: str) -> None:
    assert AUTO is not None
    cursor = COMPILER.cursor(AUTO)
    for token in letters(text):
        assert cursor.advance(token)
    assert cursor.advance(END)


def test_a_token_that_completes_a_head_and_goes_on_wrongly_is_refused() -> None:
    assert AUTO is not None
    cursor = after(COMPILER, AUTO, letters(HEAD[:-2]))
    shut = set(range(VOCAB)) - set(allowed(cursor, VOCAB))
    assert shut == {ID['":{}'], ID['": {}'], ID['":['], ID['": "'], ID['": "get']}
    assert not any(cursor.fork().advance(token) for token in shut)
    other = after(COMPILER, AUTO, letters('{"name": "get", "arguments'))
    assert set(range(VOCAB)) - set(allowed(other, VOCAB)) == {
        ID['":['],
        ID['": "'],
        ID['": "get'],
        ID['": {"'],
    }


@pytest.mark.parametrize("pieces", [["}\n", "`"], ["}", "\n"], ["}```"], ["},\n", "{"], ["}]"]])
def test_the_token_that_ends_a_call_may_go_on(pieces: list[str]) -> None:
    """A model that cannot write "}\\n" there writes "}" and stops, without the end of its fence."""
    assert AUTO is not None
    cursor = after(COMPILER, AUTO, letters(f"```json\n{CALL[:-1]}"))
    for piece in pieces:
        assert cursor.advance(ID[piece])
    assert cursor.advance(ord("x"))
    assert not after(COMPILER, AUTO, letters(f"```json\n{CALL[:-1]}")).advance(ID["}x"])
    listed = after(COMPILER, AUTO, [*letters(f"[{CALL[:-1]}"), ID["},\n"], *letters(HEAD)])
    assert ord("[") not in allowed(listed, VOCAB)


def test_another_call_may_follow_and_is_enforced_too() -> None:
    assert AUTO is not None
    for between in (", ", "\n", "; ", "\n]\n[", "\n\n"):
        cursor = after(COMPILER, AUTO, letters(f"[{CALL}{between}{HEAD}"))
        assert ord("[") not in allowed(cursor, VOCAB)
    cursor = after(COMPILER, AUTO, letters(f"{CALL} means {HEAD}"))
    assert free(cursor)


def test_the_declared_mark_is_enforced_as_before() -> None:
    assert AUTO is not None
    cursor = after(COMPILER, AUTO, letters(f"{CALL}\n<tool_call>"))
    assert ord("x") not in allowed(cursor, VOCAB)
    cursor = after(COMPILER, AUTO, letters(f"<tool_call>\n{CALL}\n</tool_call>\n{HEAD}"))
    assert ord("[") not in allowed(cursor, VOCAB)


@pytest.mark.parametrize("choice", ["none", "required", "get"])
def test_only_auto_looks_for_heads(choice: str) -> None:
    spec = OutputSpec(TOOLS, choice)
    made = spec.constraint(HERMES)
    assert spec.unmarked_calls is None
    assert not isinstance(made, StructuralTag) or made.unmarked is None
    assert OutputSpec(TOOLS, output=int).unmarked_calls is None
    assert OutputSpec(TOOLS, response_format={"type": "json_object"}).unmarked_calls is None


def walk(rng: random.Random, length: int = 60) -> list[int]:
    """A text that tends to be calls, in tokens cut at random."""
    starts = ["", "```json\n", "[", "Hm.\n", "```js\n"]
    text = rng.choice(starts) + rng.choice([HEAD, HEAD.replace(" ", "\n  "), '{"name": "get", "parameters":'])
    text += rng.choice([' {"city": "x"}}', " {}}", ' {"city": "x", "days": 3}}', " [1]"]) + rng.choice(
        ["\n```", "", ", {", "."]
    )
    raw, tokens, at = text.encode(), list[int](), 0
    while at < len(raw) and len(tokens) < length:
        fitting = [
            t for t in range(VOCAB) if t != END and (p := TOKENIZER.piece(t)) and raw.startswith(p, at)
        ]
        token = rng.choice(fitting)
        tokens.append(token)
        at += len(TOKENIZER.piece(token))
    return tokens


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_masks_allow_exactly_the_tokens_that_advance_takes(seed: int) -> None:
    assert AUTO is not None
    cursor = COMPILER.cursor(AUTO)
    for token in walk(random.Random(seed)):
        open_ = set(allowed(cursor, VOCAB))
        assert open_ == {t for t in range(VOCAB) if cursor.fork().advance(t)}
        if not cursor.advance(token):
            assert token not in open_
            return


def test_masks_within_a_call_are_never_computed_with_others() -> None:
    """The grammar goes on after the call's last brace, and the text is free."""
    assert AUTO is not None
    assert after(COMPILER, AUTO, letters(CALL[:-5])).matcher_copy() is None


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_has_the_right_mask_at_each_node(seed: int) -> None:
    assert AUTO is not None
    draft = Draft(tuple(walk(random.Random(seed))))
    made = masks(COMPILER.cursor(AUTO), draft, words(VOCAB))
    cursor = COMPILER.cursor(AUTO)
    for node in range(ROOT, len(draft) - 1):
        if node != ROOT and not cursor.advance(draft.tokens[node]):
            return
        row, want = made.after(node), None if free(cursor) else row_of(cursor, VOCAB)
        assert (row is None) == (want is None)
        assert row is None or want is None or row.tolist() == want.tolist()


def test_whatever_the_grammar_lets_through_is_read_as_calls() -> None:
    """Random choices among the allowed tokens, from an opening on."""
    assert AUTO is not None
    for seed in range(8):
        rng, cursor, text = random.Random(seed), COMPILER.cursor(AUTO), HEAD
        for token in letters(HEAD):
            assert cursor.advance(token)
        while not free(cursor) and len(text) < 3000:
            token = rng.choice([t for t in allowed(cursor, VOCAB) if t < 128 or t > 255])
            assert cursor.advance(token)
            text += TOKENIZER.piece(token).decode()
        if len(text) < 3000:
            call = text[: text.rindex("}") + 1]  # the last token may go on
            content, calls, _ = parse_tool_calls(call, HERMES, offered())
            assert (content, [call.name for call in calls]) == ("", ["get_weather"])


_parts = st.sampled_from(
    [
        HEAD,
        "{",
        '"name": "get"',
        ', "arguments":',
        "```",
        "json",
        "js",
        "\n",
        " ",
        "[",
        "]",
        ",",
        "x",
        '{"name": "get", "parameters" :',
        CALL,
    ]
)


def found_by_pattern(text: str) -> bool:
    """A slow reading of the same rule: the first opening on a line of its own, outside of other code."""
    opening = re.compile(r'\{\s*"name"\s*:\s*"(get_weather|get)"\s*,\s*"(arguments|parameters)"\s*:')
    return opening.search(text) is not None


@settings(max_examples=examples(300))
@given(text=st.lists(_parts, max_size=9).map("".join), where=cuts)
def test_heads_do_not_depend_on_how_the_text_is_cut(text: str, where: list[int]) -> None:
    openings = ToolCallOpenings(["get_weather", "get"])
    whole = openings.after(OpeningState(), text.encode())
    state = OpeningState()
    for piece in pieces(text, where):
        state = openings.after(state, piece.encode())
        if openings.complete(state):
            break
    assert state.node == whole.node
    assert not openings.complete(whole) or found_by_pattern(text)
    assert openings.complete(whole) or state.opening == whole.opening


def enforced_arguments(text: str) -> set[int]:
    """Where arguments begin whose opening a cursor finds."""
    openings, state = ToolCallOpenings(["get_weather", "get"]), OpeningState()
    found, at, raw = set[int](), 0, text.encode()
    while at < len(raw):
        state = openings.after(state, raw[at : at + 1])
        at += 1
        if openings.complete(state):
            found.add(at + len(raw[at:]) - len(raw[at:].lstrip(b" \t\r\n")))
            _, end = Nesting().after(raw[at:])
            at, state = at + end if end >= 0 else len(raw), openings.resumed(state)
    return found


_answers = st.lists(
    _parts
    | st.sampled_from([CALL, f"```json\n{CALL}\n```", "; ", "\t", "\r\n", "<tools>", "\n```\n", "{{", "}}"]),
    max_size=7,
).map("".join)


@settings(max_examples=examples(1000))
@given(lead=st.sampled_from(["", "\n", "```json\n", "[", f"{CALL}\n", f"```\n{CALL}\n```"]), rest=_answers)
def test_a_call_is_sent_before_its_end_only_where_a_grammar_enforces_it(lead: str, rest: str) -> None:
    text = lead + rest
    stream, enforced = ToolStream(HERMES, offered()), enforced_arguments(text)
    for at, character in enumerate(text):
        begun = [d for d in stream.push(character) if isinstance(d, CallDelta) and d.name is not None]
        assert not begun or character == "}" or at in enforced


def test_what_a_cursor_enforces_from_the_start_on_is_sent_before_its_end() -> None:
    for text in (
        CALL,
        f"```json\n{CALL}\n```",
        f"[{CALL}, {CALL}]",
        f"```\n{CALL}\n{CALL}\n```\n```json\n{CALL}",
    ):
        stream, sent = ToolStream(HERMES, offered()), set[int]()
        for at, character in enumerate(text):
            if any(isinstance(d, CallDelta) and d.name is not None for d in stream.push(character)):
                sent.add(at)
        assert sent == enforced_arguments(text)


@pytest.mark.parametrize("name", ["a/b", "a b", 'q"uote', "back\\slash", "ünï", "a.b-c", "x" * 64, "$^()[]*"])
def test_any_name_of_a_tool_can_be_enforced_and_checked(name: str) -> None:
    spec = OutputSpec([{"type": "function", "function": {"name": name}}])
    text = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    assert offered(COMPILER, spec).fits(name, {})
    assert not offered(COMPILER, spec).fits(name, {"a": 1})
    assert parse_tool_calls(text, HERMES, offered(COMPILER, spec))[0] == ""
    made = spec.constraint(HERMES)
    assert made is not None
    cursor = after(COMPILER, made, letters(text[: -len(" {}}")]))
    assert ord("x") not in allowed(cursor, VOCAB)


@pytest.mark.parametrize("seed", range(6))
def test_committed_tokens_enter_and_leave_calls_as_advanced_ones_do(seed: int) -> None:
    assert AUTO is not None
    advanced, committed = COMPILER.cursor(AUTO), COMPILER.cursor(AUTO)
    for token in walk(random.Random(seed)):
        if not advanced.advance(token):
            return
        assert committed.commit(token)
        committed.settle()
        assert allowed(committed, VOCAB) == allowed(advanced, VOCAB)
