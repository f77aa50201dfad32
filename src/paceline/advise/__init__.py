"""Advice for a workload: is speculation worth it, with which drafter, at which length.

speedup        the formula: tokens per pass, costs, best length, break-even
replay         acceptance of a drafter on recorded text, without a model
engine_flags   the same speculation as settings of vLLM, SGLang and llama.cpp
chart          charts as SVG, PNG and text
"""
