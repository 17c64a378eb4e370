"""Measurement of a machine: ops, links, pieces."""
