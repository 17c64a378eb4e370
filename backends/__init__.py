"""How a program runs: reference (virtual mesh), distributed (torch.distributed), triton."""
