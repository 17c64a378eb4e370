"""Planning: clusters, costs, the simulator and plans, one planner a folder."""
