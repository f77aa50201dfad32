"""The model whose text we owe: weights, forward pass and KV cache. In reading order:

base.py      what every target with a paged KV cache shares; the protocols are in types.py and heads/runner.py
load.py      the choice of a backend for a model on this machine, and the reasons against one
weights/     from GGUF files and Hugging Face folders to tensors under canonical names
kv/          the paged KV cache with its radix tree of prefixes
eager/       the decoder in plain torch: the reference, and the backend for GPUs and training
native/      the decoder in C++ for CPUs: quantised weights, one parallel region for the whole pass
cuda/        CUDA graphs and kernels over eager/
cost.py      the cost of a pass by rows and context, measured once for a model and a machine
hardware.py  CPU features
"""
