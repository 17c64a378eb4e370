"""Analyses of a program's linear maps, for planners."""
