"""Passes that form the regions of fused kernels."""
