"""Online training: drafters are trained further on the server's own traffic while it is idle.

online_trainer.py   buffers samples, runs the process, publishes versions
process.py          the background process: lowest priority, pausable, dies with the server; its memory
version_watcher.py  loads a new version of a drafter
"""
