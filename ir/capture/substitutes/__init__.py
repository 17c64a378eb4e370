"""Code that stands in for PyTorch code which the tracer cannot follow."""
