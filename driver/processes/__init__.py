"""Processes of a run: launch, rendezvous, trials."""
