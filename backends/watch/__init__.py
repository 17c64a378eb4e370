"""Detection of ranks that fail, hang or disagree."""
