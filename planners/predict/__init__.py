"""Predicted time and memory of a plan."""
