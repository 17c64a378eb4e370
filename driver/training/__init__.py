"""Checkpoints, progress and loops of training."""
