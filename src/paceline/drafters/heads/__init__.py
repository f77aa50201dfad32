"""Drafters that read the target's hidden states: small nets trained for one target."""
