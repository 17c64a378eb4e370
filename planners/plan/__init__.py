"""A plan: its JSON, its names, its checks."""
