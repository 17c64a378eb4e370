"""Relations of local values to the global program, and the arithmetic on them."""
