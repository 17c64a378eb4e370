"""Passes over the global program, before shardings are propagated."""
