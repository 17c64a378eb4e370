"""What a step takes: cluster, links, op cost, memory by liveness, simulator, pipelines."""
