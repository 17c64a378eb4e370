"""Steps on torch.distributed: one process per rank."""
