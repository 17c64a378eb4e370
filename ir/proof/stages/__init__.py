"""The walk over a program of stages, and the check of its runs."""
