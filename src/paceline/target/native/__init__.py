"""The decoder in C++: quantised weights as they are, the whole pass in one parallel region. In reading order:

target.py        the target: feeds to one native pass; the KV memory, in 16-bit codes
batch.py         the rows of a pass; branches of a draft tree get scratch blocks
packing.py       the layout of packed weights, and the repacking of a file's blocks
packed_file.py   the file of packed weights, checked as it is read
library.py       the C++ of csrc/, built for one kind of processor, and its structures
amx_probe.py     AMX, tried in a child process: equal bits, and faster?
threads.py       the thread pool that a target and its draft head share
embeddings.py    rows of the embedding and output matrices, for draft heads
block_head.py    a block head in C++
int8_weights.py  its weights, packed in 8 bits
csrc/            decoder.cpp, attention.h, linear.h, linear_pair.h, simd.h, threads.h; pack.cpp, page_file.cpp
"""
