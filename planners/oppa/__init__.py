"""OPPA: Bayesian optimisation over parallelism configurations."""
