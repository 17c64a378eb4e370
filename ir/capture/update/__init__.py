"""Trace optimizers' updates: the values that they read, and each update as a program."""
