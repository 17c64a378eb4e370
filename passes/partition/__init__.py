"""Passes that turn a global program into the program of each rank."""
