"""Grammars whose forced text has no end: none stops the server, and the others still force their text."""

import subprocess
import sys
from typing import Any

import pytest

from paceline.constraints import Compiler, compiler, sandbox_process
from paceline.constraints.forced_text import NO_FORCING, forced_text_ends
from paceline.constraints.grammars import Lark, quoted
from support.cursors import tokenizer_with

ENDLESS = [
    "start: /a*/ start",
    'start: /a+/ "a"',
    'start: "e" x | "d"\nx: /(ab)+/ x',
    'start: A "a"\nA: "a"+',
    'start: A "a"\nA\n: "a"+',
    'start: /[a]+/ "a"',
    'start: /[^\\x00-\\x60\\x62-\\x7f]+/ "a"',
    'start: /[ab&&a]+/ "a"',
    'start: /(?x)[a ]+/ "a"',
    'start: /[a ]+/x "a"',
    'start: /a{2,}/ "a"',
    'start: "//" /a*/ start',
]
ENDING = [
    'start: "word" x\nx: /[0-9]+/ | x "," x',
    'start: /"[^"]*"/',
    "start: /a{3,5}b?/",
    'start: "a"+ "b"*',
    "%import common.WS\n%ignore WS\nstart: /\\d+(\\.\\d+)?/",
    "start: /\\*[*]/",
]
# Masks along a text, and whatever is forced: what an output asks of a matcher. Ends with an error after 5 s.
WALK = """
import resource, sys, llguidance
resource.setrlimit(resource.RLIMIT_CPU, (5, 6))
matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), sys.argv[1], log_level=0)
for byte in b" eaa"[1:]:
    matcher.compute_bitmask()
    matcher.compute_ff_tokens()
    matcher.try_consume_tokens([byte])
"""


@pytest.mark.parametrize("grammar", ENDLESS)
def test_a_grammar_that_may_repeat_a_fixed_text_forces_none(grammar: str) -> None:
    assert not forced_text_ends(grammar)
    assert Lark(grammar).rules("start", quoted).endswith(NO_FORCING)
    assert NO_FORCING in Lark(grammar).rules("inner", quoted).splitlines()


@pytest.mark.parametrize("grammar", ENDING)
def test_a_grammar_that_leaves_a_choice_may_force_text(grammar: str) -> None:
    assert forced_text_ends(grammar)
    assert NO_FORCING not in Lark(grammar).rules("start", quoted)


@pytest.mark.parametrize("grammar", ENDLESS[:3])
def test_masks_of_a_grammar_without_end_are_computed(grammar: str) -> None:
    walk = [sys.executable, "-I", "-c", WALK, Lark(grammar).rules("start", quoted)]
    assert subprocess.run(walk, check=False).returncode == 0


def test_the_forced_text_of_such_a_grammar_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    real = sandbox_process.compile_grammar

    def noted(*given: Any) -> Any:
        limits.append(given[-1])
        return real(*given)

    monkeypatch.setattr(compiler, "compiled", noted)
    tokenizer = tokenizer_with(["{{"], [])
    cursor = Compiler(tokenizer, tokenizer.vocab_size).cursor(Lark('start: "{{" /-+/ ";"'))
    assert limits == [None]
    assert cursor.forced() == cursor.canonical() == []
