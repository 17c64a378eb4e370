"""State of a model that a capture depends on: settings, hooks, buffers, values."""
