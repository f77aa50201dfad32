"""Draft, verify, accept: one loop."""
