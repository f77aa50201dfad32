"""The KV cache: blocks of fixed size (PagedAttention, arXiv 2309.06180), which sequences with a common prefix
share through a radix tree (RadixAttention of SGLang, arXiv 2312.07104). In reading order:

cache.py         PagedCache: opens, extends, truncates and closes sequences; BlockTable: the blocks of one
radix_tree.py    cached prefixes, with least-recently-used eviction
disk_cache.py    the disk tier: pages of a folder, found by content, written in the background
preload.py       what was used last is loaded from it before it is asked for
page_file.py     one page of it: its key, its header and its checksum
"""
