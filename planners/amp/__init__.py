"""AMP: degrees, micro-batches, stages and placement of pipelines on mixed clusters."""
