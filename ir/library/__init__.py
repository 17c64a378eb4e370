"""Ops of our own, registered with torch.library: random numbers and attention by positions."""
