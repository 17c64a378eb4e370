"""`python -m shardweave`: the command line."""

import sys

from shardweave.driver.cli import main

sys.exit(main())
