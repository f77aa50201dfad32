"""The target as CUDA kernels: few rows, each weight read once, every row's bits independent of its company.

csrc/         the kernels (kernels.cu first), PTX one-liners, and a shim that runs them on a CPU for tests
arguments.py  the kernels' structures as ctypes sees them
driver.py     builds the kernels with NVRTC and launches them, with programmatic dependent launch
weights.py    the model's weights on the device, and which models the kernels know
packing.py    weights of 4 to 8 bits in the order that the kernels read
batch.py      from feeds to the rows of passes
memory.py     the GPU memory of a model, before it is loaded
graphs.py     static buffers, the kernels of a pass, and their CUDA graphs
block_head.py a block head's drafts in CUDA graphs
target.py     CudaTarget: the target protocol
"""
