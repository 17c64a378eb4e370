"""Passes that save memory at the price of compute or of copies to the host."""
