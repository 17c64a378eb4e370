"""Commands about plans, clusters and predictions."""
