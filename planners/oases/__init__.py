"""Oases (arXiv 2305.16121): chooses a degree of tensor parallelism for each block."""
