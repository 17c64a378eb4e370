"""The commands of `shardweave`, one file each."""
