"""The Triton backend: one generated kernel for each distinct fused region."""
