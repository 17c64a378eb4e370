"""Schedules of pipelines as data: which micro-batch each rank works on, and when."""
