"""Megatron-LM's sharding rule, applied by the structure of a program."""
