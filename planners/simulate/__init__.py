"""The simulator of one program: streams, timeline, memory."""
