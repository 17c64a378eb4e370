"""The reference backend, which runs all ranks of a virtual mesh in one process."""
