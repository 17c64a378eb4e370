"""How a program changes: one pass a file, one registry as data."""
