"""Lowering of a program by a plan: the passes that carry the plan out."""
