"""Replacements for PyTorch code that the tracer cannot follow."""
