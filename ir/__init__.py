"""What a program is: dialects, sharding algebra, capture, text, diff, verify."""
