"""The compiled step: call, accumulation, gradients."""
