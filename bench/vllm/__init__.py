"""paceline's drafters inside a running vLLM server.

server    `vllm serve` as a process of its own, in the environment of `make vllm`
command   python -m bench vllm: accepted tokens per draft, against vLLM's own n-gram drafter
"""
