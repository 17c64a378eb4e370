"""Pipeline schedules as tables: the order in which each rank runs its micro-batches."""
