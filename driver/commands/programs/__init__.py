"""Commands that read or change a program."""
