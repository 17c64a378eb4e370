"""Facts about single ops: kind, result types, FLOPs, strides, fusion."""
