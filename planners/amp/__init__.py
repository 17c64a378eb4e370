"""AMP: degrees, micro-batches, stages and placement for pipelines on mixed clusters."""
