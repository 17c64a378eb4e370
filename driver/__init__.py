"""The user's interface: compile, the command line, reports."""
