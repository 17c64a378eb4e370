"""Passes that rewrite the global program before shardings are propagated."""
