"""The dialects aten, dist and kernel, their attributes and their syntax."""
