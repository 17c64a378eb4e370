"""Simulation of pipelines by blocks and by runs."""
