"""Passes from a global program to the program of each rank."""
