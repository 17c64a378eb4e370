"""All ranks of a virtual mesh in one process."""
