"""Training losses of draft heads, one file for each family.

base     batches, soft targets, sampled positions, activation checkpointing
block    cross-entropy weighted by prefix (D-PACE), total variation, confidence
eagle    training-time test: the head reads its own output
medusa   one cross-entropy for each head
"""
