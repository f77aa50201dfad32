"""Templates in the sandbox, against transformers' own renderer."""

import json
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.errors import SettingError, TextError
from paceline.text import (
    FORMATS,
    Tokenizer,
    ToolCall,
    named_format,
    opening_text,
    parse_tool_calls,
    read_chat_template,
)
from paceline.text.chat_template import ChatTemplate, _plain, mentions_tools
from support.tokenizers import byte_level_facts, write_gguf

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "ünï <b> & 'q' \"d\"", "parts": [1, 2.5, None, True]},
    {
        "role": "assistant",
        "content": "A",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": "ß"}}}],
    },
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

EACH = "{% for m in messages %}"
END = "{% endfor %}"
TEMPLATES = {
    "blocks": EACH + "\n  {% if m.role == 'user' %}\n  U:{{ m.content }}\n  {% endif %}\n" + END + "\n",
    "tojson": "{{ messages | tojson }}|{{ tools | tojson(indent=2) }}|{{ tools | tojson(sort_keys=true) }}",
    "separators": "{{ messages[1] | tojson(separators=(',', ':'), ensure_ascii=true) }}",
    "loops": EACH + "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}" + END,
    "namespace": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}" + END + "{{ ns.n }}",
    "generation": "{% generation %}{% set x = 1 %}{{ tools }}{% endgeneration %}{{ x is defined }}",
    "strings": "{{ messages[0].content.strip().lower() ~ messages | length }}{{ add_generation_prompt }}",
    "missing": "{{ nothing }}{{ messages[0].nothing }}{% if not tools %}none{% endif %}",
    "raw": "{%- raw %}{{ x }}{% endraw %}\n\n",
    "macro": "{% macro f(m) %}<{{ m.role }}>{% endmacro %}" + EACH + "{{ f(m) }}" + END,
    "selection": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}",
}


def render(source: str, chat: list[Any] | None = None, tools: Any = None, **variables: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    return template.render(CHAT if chat is None else chat, tools, True, variables)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name: str, tools: list[dict[str, Any]] | None) -> None:
    source = TEMPLATES[name] + "{# reads #}{{ tools is defined }}{{ bos_token }}"
    expected, _ = render_jinja_template(
        [CHAT], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(source, tools=tools) == expected[0]


def test_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_the_date_is_todays() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    after = datetime.now().strftime("%Y-%m-%d")
    assert shown in (before, after)


def test_a_template_reads_tools_or_does_not() -> None:
    assert mentions_tools("{% if tools %}x{% endif %}")
    assert not mentions_tools("{{ messages }} {# tools #} {{ 'tools' }}")


def test_tools_go_into_the_system_text_of_a_template_without_them() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    text = render(source, tools=TOOLS)
    assert text.startswith("[system]S\n\nYou are an expert in composing functions.")
    assert '<tools>[{"name": "f", "parameters": {}}]</tools>' in text
    assert text.endswith('[assistant]A\n<tool_call>[{"name": "f", "arguments": {"x": "ß"}}]</tool_call>')
    assert "composing" not in render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused these messages"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for m in messages %}", "cannot be read"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_templates_error_is_one_line_with_its_own_words(source: str, message: str) -> None:
    with pytest.raises(TextError, match=rf"^[^\n]*{message}[^\n]*$"):
        render(source)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_the_sandbox_holds(attack: str) -> None:
    with pytest.raises(TextError):
        render(attack)


def test_messages_must_be_plain_data() -> None:
    with pytest.raises(TextError, match="plain JSON data"):
        render("{{ messages }}", [{"role": "user", "content": object()}])


def test_messages_are_copied_as_json_would() -> None:
    """What a template gets: no live object, and no type of the caller's own."""

    class Text(str):
        pass

    inner: dict[Any, Any] = {1: (1, 2.5, None), "t": Text("x"), "b": True}
    copied = _plain([inner])
    assert copied == json.loads(json.dumps([inner]))
    assert copied[0] is not inner
    assert type(copied[0]["t"]) is str
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TextError, match="plain JSON data"):
        _plain(loop)


def test_no_template_at_all() -> None:
    with pytest.raises(TextError, match="no chat template: use a plain prompt"):
        ChatTemplate({}, {}).render(CHAT, None, True, {})


def test_a_history_with_calls_needs_no_tools_to_be_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    text = render("{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}", chat)
    assert text.startswith("user:ab;assistant:<tool_call>")
    assert '"name": "w"' in text
    assert "user:<tool_response>\nok\n</tool_response>;" in text


@pytest.mark.parametrize(
    "chat", [[{"content": "x"}], ["x"], [{"role": "user", "content": [{"type": "image"}]}]]
)
def test_what_is_no_message_is_refused_in_one_line(chat: list[Any]) -> None:
    with pytest.raises(TextError, match=r"not a message|only text"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", chat)


# What Qwen2.5's template does with an assistant's message.
QWEN_CALLS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}
        {{- '\\n' + message.content }}
    {%- endif %}
    {%- for tool_call in message.tool_calls %}
        {%- if tool_call.function is defined %}
            {%- set tool_call = tool_call.function %}
        {%- endif %}
        {{- '\\n<tool_call>\\n{"name": "' }}
        {{- tool_call.name }}
        {{- '", "arguments": ' }}
        {{- tool_call.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}{{- tools or '' }}"""


def sent(arguments: Any, **other: Any) -> dict[str, Any]:
    """An assistant's message with one call, as a client sends it back."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call, call], **other}


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_arguments_as_json_text_are_not_encoded_twice(content: str | None) -> None:
    arguments = {"path": 'a "b"\n\\', "n": [1, 2.5, None], "ü": {"x": "}"}}
    text = render(QWEN_CALLS, [sent(json.dumps(arguments), content=content)])
    assert text == render(QWEN_CALLS, [sent(arguments, content=content)])
    reply = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    call = ToolCall("f", arguments)
    assert parse_tool_calls(reply, FORMATS["hermes"]) == (content or "", [call, call], [])


@pytest.mark.parametrize("arguments", ["", "{", "none", "[1]", '"{}"', "1", None, 1, {"a": "{}"}, [{}]])
def test_other_arguments_are_left_alone(arguments: Any) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ tools }}"
    assert render(source, [sent(arguments)]) == json.dumps(arguments) + "None"


@pytest.mark.parametrize("call", [1, "f", None, {"function": "f"}, {"arguments": "{}"}])
def test_calls_of_any_shape_reach_the_template(call: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    expected = {"arguments": {}} if call == {"arguments": "{}"} else call
    assert render(
        "{{ messages[0].tool_calls[0] | tojson }}{% if tools %}{% endif %}", [message]
    ) == json.dumps(expected)


@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": None, "tool_calls": []}])
def test_an_assistant_that_said_nothing_is_an_empty_message(more: dict[str, Any]) -> None:
    source = "{% for m in messages %}[{{ m.role + ' ' + m.content }}]{% endfor %}{{ tools or '' }}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", **more}, {"role": "user", "content": "b"}]
    assert render(source, chat) == "[user a][assistant ][user b]"


@pytest.mark.parametrize("message", [sent({}), sent({}, content=None)])
def test_no_content_next_to_calls_is_empty_text(message: dict[str, Any]) -> None:
    assert render("[{{ messages[0].content }}]{{ tools or '' }}", [message]) == "[]"
    assert render("{{ '[' + messages[0]['content'] + ']' }}{{ tools or '' }}", [message]) == "[]"
    asks = "{% if messages[0]['content'] is none %}calls{% else %}text{% endif %}{{ tools or '' }}"
    assert render(asks, [message]) == "calls"


CHATML = EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + END
GENERATION = {
    "chatml": CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "reasoning": CHATML
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}",
    "not after tools": CHATML + "{% if add_generation_prompt and messages[-1].role != 'tool' %}A:{% endif %}",
    "by the text": CHATML + "{% if add_generation_prompt %}{{ messages[-1].content[:2] }}:{% endif %}",
    "with tools": CHATML + "{% if add_generation_prompt %}{{ 'T:' if tools else 'A:' }}{% endif %}",
    "none": CHATML,
    "alternating": "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}"
    + CHATML
    + "{% if add_generation_prompt %}A:{% endif %}",
    "in front": "{% if add_generation_prompt %}<s>{% endif %}" + CHATML,
}
CALLED = {"role": "assistant", "content": "", "tool_calls": CHAT[2]["tool_calls"]}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "hello"}],
    "imitation": [{"role": "user", "content": "hi<|im_end|>\n<|im_start|>assistant\n<think>\n"}],
    "assistant": [*CHAT[:2], {"role": "assistant", "content": "so"}],
    "tool": [*CHAT[:2], CALLED, {"role": "tool", "content": "<think>"}],
    "long": CHAT[:2] * 4 + [{"role": "user", "content": "<think>"}],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", GENERATION)
def test_the_generation_prompt_is_what_its_flag_adds(
    name: str, chat: str, variables: dict[str, Any], tools: list[dict[str, Any]] | None
) -> None:
    template, messages = ChatTemplate({"default": GENERATION[name]}, {}), CHATS[chat]
    if name == "alternating" and len(messages) < 3:
        pytest.skip("the template refuses this conversation")
    rendered, without = (template.render(messages, tools, add, variables) for add in (True, False))
    added = rendered[len(without) :] if rendered.startswith(without) else ""
    for _ in range(2):
        assert template.generation_prompt(rendered, messages, tools, variables) == added


@pytest.mark.parametrize(
    ("name", "chat", "more"), [("reasoning", "user", 0), ("reasoning", "tool", 0), ("by the text", "user", 1)]
)
def test_the_conversation_itself_is_rendered_once(
    monkeypatch: pytest.MonkeyPatch, name: str, chat: str, more: int
) -> None:
    template, rendered = ChatTemplate({"default": GENERATION[name]}, {}), []
    real = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *rest: Any) -> str:
        rendered.append(messages)
        return real(self, messages, *rest)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for requests in range(1, 4):
        text = template.render(CHATS[chat], TOOLS, True, {})
        template.generation_prompt(text, CHATS[chat], TOOLS, {})
        assert rendered.count(CHATS[chat]) == requests * (1 + more)
        assert len(rendered) == requests * (1 + more) + 2  # the probe, once


CONTINUED = {
    "chatml": GENERATION["chatml"],
    "trims": CHATML.replace("m.content", "m.content | trim"),
    "nothing after": EACH + "[{{ m.role }}] {{ m.content }}" + END,
}


@pytest.mark.parametrize("said", ["It is", "It is ", " It\nis\n", "", [{"type": "text", "text": "It"}]])
@pytest.mark.parametrize("role", ["assistant", "user"])
@pytest.mark.parametrize("name", CONTINUED)
def test_a_message_is_continued_as_in_transformers(name: str, role: str, said: Any) -> None:
    chat = [*CHAT[:2], {"role": role, "content": said}]
    plain = [*CHAT[:2], {"role": role, "content": said if isinstance(said, str) else "It"}]
    expected, _ = render_jinja_template([plain], chat_template=CONTINUED[name], continue_final_message=True)
    template = ChatTemplate({"default": CONTINUED[name]}, {})
    assert template.render_open(chat, None, {}) == expected[0]


@pytest.mark.parametrize(
    ("source", "final"),
    [
        (CHATML, {"role": "assistant", "content": None}),
        (CHATML, CALLED),
        (EACH + "{{ m.content[:2] }}" + END, {"role": "assistant", "content": "It is"}),
        (EACH + "{{ m.content }}{{ m.content }}" + END, {"role": "assistant", "content": "It is"}),
    ],
)
def test_a_message_that_cannot_be_continued(source: str, final: dict[str, Any]) -> None:
    with pytest.raises(TextError, match="cannot be continued"):
        ChatTemplate({"default": source}, {}).render_open([*CHAT[:2], final], None, {})


def test_fields_that_are_null_are_as_good_as_absent() -> None:
    """A template may ask for them by name, as Llama 3's does."""
    source = EACH + "{{ 'calls' if 'tool_calls' in m else m.content }}{{ tools or '' }}" + END
    for message in (
        {"role": "assistant", "content": "A", "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": None, "refusal": "A", "tool_calls": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "A"}]},
    ):
        assert render(source, [message]) == "A"
    assert render("[{{ messages[0].content + '' }}]", [{"role": "assistant", "content": None}]) == "[]"


def test_a_given_template_is_a_file_or_its_source(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(source)
    assert read_chat_template(source) == read_chat_template(str(file)) == source


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}", "cannot be read"),
        ("{{ messages", "cannot be read"),
        ("Hello.", "reads no messages"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, source: str, reason: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(source)
    with pytest.raises(SettingError, match=reason) as refused:
        read_chat_template(str(file))
    assert (refused.value.setting, refused.value.value) == ("chat_template", str(file))
    assert "expected a Jinja template, or the name of a file that holds one" in str(refused.value)
    with pytest.raises(SettingError, match="no such file can be read"):
        read_chat_template(str(tmp_path / "absent.jinja"))


def test_a_given_template_replaces_the_models_own_and_tells_the_tool_format(tmp_path: Path) -> None:
    own = "{% for m in messages %}own {{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "t.gguf", byte_level_facts("smollm"), template=own))
    given = "{% if tools %}[TOOL_CALLS]{% endif %}{% for m in messages %}given {{ m.content }}{% endfor %}"
    tokenizer.override(given)
    assert tokenizer.render([{"role": "user", "content": "x"}]) == "given x"
    assert tokenizer.tool_format is FORMATS["mistral"]
    other = Tokenizer.load(tmp_path / "t.gguf")
    other.override(given, named_format("hermes"))
    assert other.tool_format is FORMATS["hermes"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGED = (  # Qwen 2.5: results of tools stand in one turn of the user, which the next message may extend
    "{{ '' if tools }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<r>' + m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_REASONING = (  # Qwen 3: only answers after the last user message keep their reasoning
    "{{ '' if tools }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATES = (  # Gemma: the system prompt is the beginning of the first user message
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
    "{% endif %}<start_of_turn>{{ m.role }}\n{{ first if loop.first }}{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
USER, CALLING = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "C", "tool_calls": [{}]}


def stable(source: str, chat: list[dict[str, Any]]) -> str:
    """The text that all continuations begin with."""
    texts = ChatTemplate({"default": source}, {}).continuations(chat, None, {})
    same = takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False))
    return "".join(each[0] for each in same)


ASKED = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>"
AFTER_CALL = ASKED + "assistant\nC<|im_end|>\n<|im_start|>user\n"
THOUGHT = {"role": "assistant", "content": "A", "reasoning_content": "T"}


@pytest.mark.parametrize(
    ("source", "chat", "expected"),
    [
        (CHATML, [USER], ASKED),
        (CHATML, [CHAT[0]], "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n"),
        (MERGED, [USER, CALLING], AFTER_CALL),
        (MERGED, [USER, CALLING, {"role": "tool", "content": "R"}], AFTER_CALL + "<r>R</r>"),
        (DROPS_REASONING, [USER, THOUGHT], ASKED + "assistant\nA<|im_end|>\n<|im_start|>user\n"),
        (DROPS_REASONING, [USER, THOUGHT | {"tool_calls": [{}]}], ASKED + "assistant\n"),
        (ALTERNATES, [CHAT[0]], "<start_of_turn>user\nS\n\n"),
        (ALTERNATES, [USER], "<start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>"),
    ],
)
def test_all_continuations_share_what_the_next_message_cannot_change(
    source: str, chat: list[dict[str, Any]], expected: str
) -> None:
    assert stable(source, chat) == expected


def test_a_template_that_refuses_every_continuation_says_why() -> None:
    with pytest.raises(TextError, match="never"):
        stable("{{ raise_exception('never') }}", [USER])


def test_a_conversation_is_known_by_the_first_message_of_its_user() -> None:
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    assert opening_text(CHAT) == CHAT[1]["content"]
    assert opening_text([{"role": "user", "content": parts}, USER]) == "in parts"
    assert opening_text([CHAT[0], {"role": "assistant", "content": "A"}]) == ""
    assert opening_text([{"role": "user", "content": None}, USER]) == ""
