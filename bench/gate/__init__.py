"""The release gate.

operating   how often its verdicts are wrong, and how soon they come, by simulation
command     prints the operating characteristics
"""
