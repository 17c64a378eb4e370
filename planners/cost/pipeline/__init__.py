"""Plans with pipeline stages and ZeRO, simulated event by event: by block, or run by run."""
