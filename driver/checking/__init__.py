"""Comparison of programs and steps with eager PyTorch."""
