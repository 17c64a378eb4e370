"""Fused regions compiled by Inductor, PyTorch's own compiler."""
