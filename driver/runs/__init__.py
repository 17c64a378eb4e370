"""Measured training runs: read, predicted, and used to refine a cluster."""
