"""The release gate.

operating     how often its verdicts are wrong, and how soon they come, by simulation
groundedness  what the groundedness score can tell, on public sets
sabotage      candidates that are wrong on purpose
served        `paceline gate run` on a real model: speculative, equal and sabotaged candidates
command       prints the first two
"""
