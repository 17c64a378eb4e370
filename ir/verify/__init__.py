"""Verification of programs."""
