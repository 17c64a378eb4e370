"""The planner `auto`: a joint search over all dimensions of a plan, priced by one cost model."""
