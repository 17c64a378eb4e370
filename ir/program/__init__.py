"""Program: text, stages, blocks, storage, traffic and statistics."""
