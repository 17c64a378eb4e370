"""Views of a program for a person: outline, diff, HTML, statistics."""
