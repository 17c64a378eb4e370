"""Passes' work on pipelines: one step becomes a function for each stage and direction."""
