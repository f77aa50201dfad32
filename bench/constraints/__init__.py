"""python -m bench tools, schemas: constrained answers.

tools            python -m bench tools
recorded_calls   recorded turns that end in tool calls
tool_rows        their rows and columns
schemas          python -m bench schemas
schema_rows      their rows and columns
timed_cursor     grammars whose time is counted
mask_cost        time of the masks of a round
"""
