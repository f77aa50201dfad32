"""A tiny model of random weights with a tokenizer and a chat template: for what needs no good answers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import EngineConfig
from paceline.paths import home
from support.native_cases import tiny_model
from support.running import Running, running
from support.text_cases import byte_level_facts
from support.tiny_gguf import Sizes

TEMPLATE = """{%- if tools %}<|im_start|>system
Call a tool within <tool_call></tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is not none %}{{ message.content + '' }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name + '' }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAME = "toy.gguf"  # of the file, and of the model


def toy_chat_model(folder: Path) -> Path:
    """A model file of 2 MB that loads in milliseconds."""
    facts = byte_level_facts("smollm")
    sizes = Sizes(2, 256, 4, 2, 64, 256, len(facts["tokens"]), 8192)
    return tiny_model(folder / NAME, kind="Q8_0", sizes=sizes, tokenizer=facts, template=TEMPLATE)


@contextmanager
def toy_running(folder: Path, **settings: Any) -> Iterator[Running]:
    """A server of such a model; what is made for the model stays in the folder, compiled code is shared."""
    (home() / "native").mkdir(parents=True, exist_ok=True)
    (folder / "home").mkdir()
    (folder / "home" / "native").symlink_to(home() / "native")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACELINE_HOME", str(folder / "home"))
            patch.chdir(toy_chat_model(folder).parent)  # a model is called what it is asked for by
            server = stack.enter_context(running(NAME, EngineConfig("cpu", cache_mb=64), **settings))
        yield server
