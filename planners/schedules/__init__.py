"""Pipeline schedules as data: the order in which each rank runs its micro-batches."""
