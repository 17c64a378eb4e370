"""Parameters, optimizer state and checkpoints of a step."""
