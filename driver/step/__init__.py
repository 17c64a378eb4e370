"""`sw.compile`: from a request to a step."""
