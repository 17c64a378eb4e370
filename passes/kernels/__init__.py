"""Passes that group ops into regions, each to be one kernel."""
