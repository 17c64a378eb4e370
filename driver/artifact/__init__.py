"""Steps compiled ahead: a file from which every rank starts without capture and planning."""
