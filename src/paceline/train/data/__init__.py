"""Training data: recorded conversations, and the target's own answers to them.

conversations      conversations from .jsonl files or a trace store
held_out           the held-out split
prompts            prompts in the target's chat template
synthetic          further requests, written by the target
answer_plan        which answers are written, and how
target_answers     writes them, on a CPU through the engine: the whole step from conversations to a dataset
server_answers     by a vLLM server elsewhere
vllm_requests      requests to it
rollout            on a GPU, with continuous batching; greedy or sampled
rollout_cache      its KV cache and decode step
dataset            answers in a file, and batches of them
text_kind          prose, code or JSON, token by token
"""
