"""The systems measured beside one another, each a child process in an environment of its own."""
