"""The HTTP server, and what it tells about its requests."""
