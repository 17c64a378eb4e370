"""The rule of Megatron-LM, found in the structure of a program."""
