"""Batches that ranks give: the same global batch on all ranks, or each rank's own rows."""
