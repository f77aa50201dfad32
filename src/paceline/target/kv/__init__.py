"""The KV cache: blocks of fixed size (PagedAttention, arXiv 2309.06180), which sequences with a common prefix
share through a radix tree (RadixAttention of SGLang, arXiv 2312.07104). In reading order:

cache.py         PagedCache: opens, extends, truncates and closes sequences; BlockTable: the blocks of one
radix_tree.py    cached prefixes, with least-recently-used eviction
"""
