"""Advice for a workload: is speculation worth it, with which drafter, at which length.

replay   acceptance of a drafter on recorded text, without a model
"""
