"""Online training: the process that trains a server's drafters on its traffic.

process_main     entry point; ends with the server
refresh          trains each drafter, and makes a version of it if it got better
online_batches   batches from recorded samples
"""
