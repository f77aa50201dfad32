"""What an output may be: schemas, tools, patterns and grammars, enforced token by token.

grammars.py   what a user can ask for, each as rules of one grammar
tools.py      tool calls in a model family's own format
request.py    which of these a request means
compiler.py   from a constraint to a cursor, for one tokenizer; keeps what it compiled
cursor.py     a place in a grammar
switch.py     free text until a trigger, then a grammar
walk.py       what may follow each guess of a draft
explain.py    why a grammar cannot be enforced, in the user's terms
"""

from paceline.constraints.compiler import Compiler, check
from paceline.constraints.grammars import (
    Choice,
    Constraint,
    Json,
    Lark,
    Regex,
    Switched,
    Whitespace,
    response_format,
)
from paceline.constraints.request import Wanted
from paceline.constraints.tools import tool_calls

__all__ = [
    "Choice",
    "Compiler",
    "Constraint",
    "Json",
    "Lark",
    "Regex",
    "Switched",
    "Wanted",
    "Whitespace",
    "check",
    "response_format",
    "tool_calls",
]
