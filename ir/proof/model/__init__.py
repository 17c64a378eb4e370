"""The expressions of the global program; equal expressions share one number."""
