"""Builds, tunes and launches generated kernels."""
