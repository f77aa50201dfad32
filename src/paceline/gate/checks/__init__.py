"""Checks: each is a small function from pairs and a policy to a finding.

finding      a finding, and the two ways to it: a paired log ratio, a paired difference
latency      TTFT, TPOT, end-to-end time: ratios, gain, quantiles, variance, time-outs crossed
agreement    greedy text agreement, equality of distributions
quality      truncation, stop sequences, schemas, tool calls, groundedness, task completion, any score
operations   errors, retries, fallbacks, user feedback
cost         tokens, passes, GPU time; acceptance by position
"""
