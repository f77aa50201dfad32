"""Drafters trained on the target's own answers."""
