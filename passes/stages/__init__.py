"""Functions of pipeline stages, made from one step."""
