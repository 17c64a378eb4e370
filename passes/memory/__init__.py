"""Passes that trade memory for compute."""
