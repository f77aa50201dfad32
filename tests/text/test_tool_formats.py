"""The families of models that call tools: which one a template belongs to, and how its calls look."""

from pathlib import Path

import pytest

from paceline.errors import SettingError
from paceline.text import (
    FORMATS,
    Detokenizer,
    StopChecker,
    Tokenizer,
    ToolCall,
    call_id,
    named_format,
    parse_tool_calls,
    render_calls,
    tool_format,
)
from support.tokenizers import byte_level_facts, write_gguf

ADD = ToolCall("add", {"a": 1, "b": "ß"})
SUB = ToolCall("sub", {})

# The lines in which each template writes a call, as its models' files have them.
QWEN = r"""{%- for tool_call in message.tool_calls %}{{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}
{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"""
HERMES_2_PRO = r"""{{- '", "parameters": ' + json_to_python_type(tool.parameters) }}
{{- 'Each function call should be enclosed within <tool_call> </tool_call> XML tags' }}"""
LLAMA_3_1 = r"""{%- if builtin_tools is defined %}{{- "<|python_tag|>" + tool_call.name + ".call(" }}
{%- else %}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
{{- tool_call.arguments | tojson }}{{- "}" }}{%- endif %}"""
LLAMA_3_2 = r"""{%- if not tools is none %}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
{{- tool_call.arguments | tojson }}{{- "}" }}{%- endif %}"""
MISTRAL = r"""{%- elif message.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}{%- for tool_call in
message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}{%- endfor %}"""
SMOLLM2_BIG = """{%- if tools %}<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}}
]</tool_call>{%- endif %}"""
NO_TOOLS = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (QWEN, "hermes"),
        (HERMES_2_PRO, "hermes"),
        (LLAMA_3_1, "llama3"),
        (LLAMA_3_2, "llama3"),
        (MISTRAL, "mistral"),
        (SMOLLM2_BIG, "smollm2"),
        (NO_TOOLS, "smollm2"),
        ("", "smollm2"),
        (None, "smollm2"),
    ],
)
def test_the_template_tells_the_family(template: str | None, family: str) -> None:
    assert tool_format(template) is FORMATS[family]


A = '{"name": "add", "arguments": {"a": 1, "b": "ß"}}'
S = '{"name": "sub", "arguments": {}}'


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{S}\n</tool_call>"),
        ("smollm2", f"<tool_call>[{A}, {S}]</tool_call>"),
        ("llama3", f"{A}; {S}".replace("arguments", "parameters")),
        ("mistral", f"[TOOL_CALLS][{A}, {S}]"),
    ],
)
def test_calls_as_each_family_writes_them(family: str, text: str) -> None:
    assert render_calls([ADD, SUB], FORMATS[family]) == text
    assert parse_tool_calls(text, FORMATS[family]) == ("", [ADD, SUB], [])
    assert parse_tool_calls(text) == ("", [ADD, SUB], [])  # the text itself tells the family


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", f"<tool_call>{A}</tool_call><tool_call>{S}</tool_call>"),
        ("hermes", f"\n\n<tool_call>\n{A}\n<tool_call>\n{S}"),
        ("hermes", f"<tool_call>\n{A}\n{S}\n</tool_call>\n"),
        ("hermes", f"<tool_call>[{A}, {S}]</tool_call>"),
        ("hermes", f"<tool_call>{{{A}}}</tool_call><tool_call>\n{{{S}}}\n</tool_call>"),
        ("hermes", f"<tool_call>{A[:-1]}</tool_call><tool_call>{S[:-1]}"),
        ("hermes", f"<tool_call>{A}</tool_call><tool_call>{S}</tool_"),
        ("hermes", '<tool_call>{"arguments": {"a": 1, "b": "ß"}, "name": "add"}</tool_call><tool_call>' + S),
        ("hermes", f'<tool_call>{A[:-1]}, "id": "x}}"}}</tool_call><tool_call>{S}</tool_call>'),
        ("smollm2", f"<tool_call>\n[\n{A},\n{S},\n]\n</tool_call>"),
        ("smollm2", f"<tool_call>[{A}, {S}</tool_call>"),
        ("smollm2", f"<tool_call>{A}</tool_call>\n<tool_call>{S}</tool_call>"),
        ("llama3", f"<|python_tag|>{A}; {S}"),
        ("llama3", f"\n\n{A}\n{S}\n"),
        ("llama3", f'{{"type": "function", {A[1:]}; <|python_tag|>{S}'),
        ("mistral", f'[TOOL_CALLS] [{A[:-1]}, "id": "abcdefghi"}}, {S}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "ß"}[TOOL_CALLS]sub[ARGS]{}'),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": "ß"}[TOOL_CALLS]sub {}'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1, "b": "ß"}\n[TOOL_CALLS]sub[ARGS]{}'),
    ],
)
def test_the_forms_models_write_on_their_own(family: str, text: str) -> None:
    assert parse_tool_calls(text, FORMATS[family]) == ("", [ADD, SUB], [])
    assert parse_tool_calls(text) == ("", [ADD, SUB], [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama3", f"Here: {A}"),
        ("llama3", '{"answer": 42}'),
        ("llama3", f"[{A}]"),
        ("hermes", A),
        ("hermes", f"[TOOL_CALLS][{A}]"),
        ("mistral", f"<tool_call>{A}</tool_call>"),
    ],
)
def test_what_another_family_would_call_a_call_is_text(family: str, text: str) -> None:
    assert parse_tool_calls(text, FORMATS[family]) == (text, [], [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama3", '<|python_tag|>print("hi")'),
        ("llama3", '{"name": "Ada", "born": 1815}'),
        ("mistral", "[TOOL_CALLS] is a token"),
        ("mistral", "[TOOL_CALLS]name[ARGS]none"),
        ("hermes", "Write <tool_call> first"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": %s}}' % ("[" * 101 + "]" * 101)),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": %s}}' % ("9" * 5000)),
    ],
)
def test_what_only_begins_like_a_call_stays_in_the_text(family: str, text: str) -> None:
    content, calls, errors = parse_tool_calls(text, FORMATS[family])
    assert (content, calls) == (text, [])
    assert len(errors) == 1
    assert errors[0].startswith("the tool call at character ")


def test_arguments_given_twice_are_not_lost() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}'
    assert parse_tool_calls(text) == (', "parameters": {"a": 1}}', [ToolCall("f", {})], [])


def test_a_call_keeps_the_text_of_its_arguments() -> None:
    assert ToolCall("f", {"x": "é"}).text == '{"x": "é"}'
    written = '{"x":"\\u00e9" }'
    for members in (f'"name": "f", "arguments": {written}', f'"arguments": {written}, "name": "f"'):
        (call,) = parse_tool_calls(f"<tool_call>{{{members}}}")[1]
        assert (call, call.text) == (ToolCall("f", {"x": "é"}), written)


@pytest.fixture
def mistral(tmp_path: Path) -> Tokenizer:
    special = ("<s>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "</s>")
    facts = byte_level_facts("smollm", special)
    return Tokenizer.load(write_gguf(tmp_path / "t.gguf", facts, template=MISTRAL))


def test_control_tokens_of_calls_are_shown_on_request(mistral: Tokenizer) -> None:
    assert mistral.tool_format is FORMATS["mistral"]
    assert {mistral.piece(i) for i in mistral.tool_marks} == {b"[TOOL_CALLS]", b"[ARGS]"}
    ids = mistral.encode("[INST]a[TOOL_CALLS]f[ARGS]{}</s>", bos=False)
    shown = Detokenizer(mistral, keep=mistral.tool_marks)
    assert "".join([*map(shown.push, ids), shown.flush()]) == "a[TOOL_CALLS]f[ARGS]{}"
    hidden = Detokenizer(mistral)
    assert "".join([*map(hidden.push, ids), hidden.flush()]) == "af{}"
    stop = StopChecker(mistral, ["S]f"], keep=mistral.tool_marks)
    assert any(map(stop, ids))


CHECKED_IDS = """{% if tools %}{{ tools }}{% endif %}{% for m in messages %}
{% for call in m.tool_calls or [] %}{% if call.id|length != 9 %}
{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}[TOOL_CALLS]
{{ call.id }}{% endfor %}{% endfor %}"""


def test_ids_of_calls_are_what_the_template_takes(tmp_path: Path) -> None:
    facts = byte_level_facts("smollm")
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "t.gguf", facts, template=CHECKED_IDS))
    made = [call_id("chatcmpl-1/0", i, tokenizer.tool_format) for i in range(50)]
    assert all(name.isalnum() and name.isascii() for name in made)
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in made]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert all(name in tokenizer.decode(tokenizer.encode_chat(chat)) for name in made)


def test_a_format_whose_marks_are_text_has_no_control_tokens(tmp_path: Path) -> None:
    facts = byte_level_facts("qwen2")
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "t.gguf", facts, template=QWEN))
    assert (tokenizer.tool_format.name, tokenizer.tool_marks) == ("hermes", frozenset())
    facts = byte_level_facts("llama-bpe", ("<|begin_of_text|>", "<|python_tag|>", "<|eot_id|>"))
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "l.gguf", facts, template=LLAMA_3_1))
    assert [tokenizer.piece(i) for i in tokenizer.tool_marks] == [b"<|python_tag|>"]


def test_an_unknown_format_is_an_error_that_lists_the_known_ones() -> None:
    assert named_format("llama3") is FORMATS["llama3"]
    with pytest.raises(SettingError, match="expected one of harmony, hermes, llama3, mistral, smollm2"):
        named_format("qwen")
