"""AxoNN's planner: grids of x, y, z and data, ranked by a communication model."""
