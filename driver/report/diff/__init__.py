"""Differences of programs as text and HTML."""
