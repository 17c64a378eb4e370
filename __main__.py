"""`python -m shardweave`: the command line."""

from shardweave.driver.cli import console_main

console_main()
