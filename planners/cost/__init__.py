"""Cost of a step: cluster, links, op cost, memory by liveness, simulator, pipelines."""
