"""python -m bench: paceline against other engines, in one run on this machine.

command   the command line
rounds    the measurement: systems take turns, prompt by prompt
rows      single answers to rows
table     rows to a table
"""
