"""What a good program is: cluster, cost, simulator and plans, one planner a file."""
