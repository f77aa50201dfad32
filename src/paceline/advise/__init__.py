"""Advice for a workload: is speculation worth it, with which drafter, at which length.

speedup        the formula: tokens per pass, costs, best length, break-even
traffic        recorded requests by route, and the figures of a workload
target_outputs the target's outputs to these requests: recorded, or written now
replay         acceptance of drafters on recorded outputs, without a pass of the model
advice         per route: which drafters, which length, how fast, or why not
memory_estimate weights, drafters and KV cache at the planned load
routes_file    the advice as a routes file
report         the advice as JSON and HTML
engine_flags   the same speculation as settings of vLLM, SGLang and llama.cpp
chart          charts as SVG, PNG and text
"""
