"""Traces: a record of each request and its rounds. Text only where that is switched on.

record     the records, and what is left of them without text
recorder   a sink that saves records from a thread of its own; never blocks or raises
online     samples for online training, its settings, and the job of the trainer process
timeline   agent runs: the turns of a conversation on one clock, and two runs compared
store/     the database
"""
