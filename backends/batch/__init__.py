"""Batches that ranks give: one that all give alike, or the rows of each."""
