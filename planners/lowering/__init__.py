"""The passes that carry a plan out."""
