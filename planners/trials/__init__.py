"""Trials of training configurations, in the simulator or on real processes."""
