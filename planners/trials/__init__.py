"""Trials of configurations, in the simulator or on real processes."""
