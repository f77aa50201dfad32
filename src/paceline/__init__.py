"""Faster agents, word for word."""
