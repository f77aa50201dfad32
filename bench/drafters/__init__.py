"""python -m bench drafters, lists, draft-pass: what drafters give and cost.

command      python -m bench drafters
turns        recorded turns to answer
arms         the lists of drafters that are measured
runs         the measurement
rows         single answers to rows, tables and verdicts
lists        python -m bench lists
draft_pass   python -m bench draft-pass
"""
