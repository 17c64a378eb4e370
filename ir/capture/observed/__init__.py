"""Observe the state that a capture depends on: settings, hooks, buffers, values."""
