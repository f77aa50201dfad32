"""Training data: recorded conversations, and the target's own answers to them.

conversations      conversations from .jsonl files or a trace store
held_out           the held-out split
prompts            prompts in the target's chat template
synthetic          further requests, written by the target
answer_plan        which answers are written, and how
target_answers     the whole step from conversations to a dataset
rollout            answers through the engine, many at once; greedy or sampled
server_answers     by a vLLM server elsewhere
vllm_requests      requests to it
dataset            answers in a file, and batches of them
text_kind          prose, code or JSON, token by token
"""
