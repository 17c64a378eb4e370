"""Plans: their data, JSON, names of layers and ops, and checks."""
