"""Constrained decoding: schemas, tools, patterns and grammars, enforced token by token with llguidance.

request.py          OutputSpec: the constraint that a request's parameters mean; tool calls
grammars.py         Json, Regex, Lark, Choice: each as rules of one Lark grammar
forced_text.py      Lark grammars in which forced text may have no end
offered_tools.py    ToolSchemas: calls found in free text against the tools of their request
json_schema.py      JSON Schemas as data, and safe changes to them
python_types.py     Python types as constraints, and the values of their texts
pydantic_schema.py  Pydantic's schemas of Python types, made enforceable
functions.py        Tool: Python functions as tools
template.py         Template: fixed text with constrained holes
compiler.py         from a constraint to a cursor, for one tokenizer; caches compiled grammars
sandbox.py          large grammars in a process that can be killed, before they are compiled here
sandbox_process.py  that process
cursor.py           a position in a grammar
trigger_cursor.py   free text until a trigger or the opening of a call, then a grammar
tool_call_openings.py  finds the openings of calls that have no trigger
draft_masks.py      token masks for every node of a draft
text_matcher.py     checks a whole text against a constraint
explain.py          errors of llguidance in the user's terms
"""

from paceline.constraints.compiler import Compiler, GrammarLimits, check
from paceline.constraints.functions import AnyTool, Tool, as_tools, tool_schemas
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
from paceline.constraints.offered_tools import ToolSchemas
from paceline.constraints.python_types import Output, output
from paceline.constraints.request import UNCONSTRAINED, Answer, OutputSpec, tool_calls
from paceline.constraints.template import Template

__all__ = [
    "UNCONSTRAINED",
    "Answer",
    "AnyTool",
    "Choice",
    "Compiler",
    "Constraint",
    "GrammarLimits",
    "Json",
    "Lark",
    "Output",
    "OutputSpec",
    "Regex",
    "StructuralTag",
    "Template",
    "Tool",
    "ToolSchemas",
    "Whitespace",
    "as_tools",
    "check",
    "output",
    "response_format",
    "tool_calls",
    "tool_schemas",
]
