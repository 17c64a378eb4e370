"""Passes that insert, delete, join and start collectives."""
