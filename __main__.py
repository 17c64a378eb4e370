"""`python -m shardweave`: the command line."""

import gc

from shardweave.driver.cli import main
from shardweave.driver.launch import end_process

# Torch's modules are most of what a command makes, and they stay: garbage is looked for rarely,
# and nothing is taken apart when the command is done.
gc.set_threshold(100_000)
end_process(main())
