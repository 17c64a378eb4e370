"""The records of ATen ops, one file per family."""
