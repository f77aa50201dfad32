"""Shared by drafters.

grammar_filter.py  grammar-valid prefixes and trees; scores of forced tokens
draft_sampling.py  tokens from a drafter's logits: with the target's noise, or with a q
draft_builder.py   the node list of a draft in progress
"""
