"""python -m bench tools, tool-calls, schemas: constrained answers.

tools            python -m bench tools
recorded_calls   recorded turns that end in tool calls
tool_rows        their rows and columns
auto_calls       python -m bench tool-calls
vllm_parsers     vLLM's tool parsers, without vLLM
llama_calls      llama.cpp's server on the same turns
schemas          python -m bench schemas
schema_rows      their rows and columns
timed_cursor     grammars whose time is counted
mask_cost        time of the masks of a round
"""
