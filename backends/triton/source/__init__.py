"""Triton source text from a fused region."""
