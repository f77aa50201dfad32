"""The decoder in plain torch: the reference for other backends, and what runs on GPUs. In reading order:

target.py      the target: feeds to spans of rows, kept rows, cache slots
decoder.py     one decoder for all model families
layer.py       attention and a gated feed-forward network
attention.py   attention over paged keys in fixed tiles, so that a row's bits do not depend on other rows
linear.py      matrix products, and the number of rows at which theirs are invariant
rope.py        rotary positions
"""
