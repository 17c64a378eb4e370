"""From a torch module to a program: trace, import, canonical forms, precision."""
