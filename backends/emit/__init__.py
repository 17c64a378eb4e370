"""The emitted Python module and the functions that its statements call."""
