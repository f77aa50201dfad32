"""What an output may be: schemas, tools, patterns and grammars, enforced token by token.

grammars.py   what a user can ask for, each as rules of one grammar
outputs.py    Python types as constraints, and the values that texts stand for
typed.py      schemas of Python types
template.py   fixed text with constrained gaps
matching.py   whether a text fits a constraint
schema.py     JSON Schemas, changed where a change is safe
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
    StructuralTag,
    Whitespace,
    response_format,
)
from paceline.constraints.python_types import Output, output
from paceline.constraints.request import UNCONSTRAINED, OutputSpec
from paceline.constraints.template import Template
from paceline.constraints.tool_grammar import tool_calls

__all__ = [
    "UNCONSTRAINED",
    "Choice",
    "Compiler",
    "Constraint",
    "Json",
    "Lark",
    "Output",
    "OutputSpec",
    "Regex",
    "StructuralTag",
    "Template",
    "Whitespace",
    "check",
    "output",
    "response_format",
    "tool_calls",
]
