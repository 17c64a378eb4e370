"""Simulator of one program: streams, timeline, memory, and the optimizer's update."""
