"""Passes that insert, delete, join and start collectives (messages between ranks)."""
