"""Oases (arXiv 2305.16121): a degree of tensor parallelism for each block."""
