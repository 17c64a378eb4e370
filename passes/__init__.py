"""Passes, which change programs: one a file, one registry as data."""
