"""Measurement of a machine: ops, links, programs."""
