"""Measurements of paceline alone.

command      python -m bench own
decode       plain decoding against Transformers
agent        examples/agent.py, plain and speculative
overhead     time of a round outside the forward pass
suffix       the suffix drafter with a million tokens
memory       resident memory
passes       python -m bench passes
reading      python -m bench reading
experts      python -m bench experts
divergence   python -m bench divergence
bandwidth    the machine's memory bandwidth
"""
