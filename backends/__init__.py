"""Backends that run programs: reference (virtual mesh), distributed (torch.distributed), triton."""
