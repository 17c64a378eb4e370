"""The sharding algebra at work: factor rules, assignment, propagation, resharding, partitioning."""
