"""How people hold it: compile, the command line, reports."""
