"""The representation of a program: dialects, sharding algebra, capture, text, diff, verify."""
