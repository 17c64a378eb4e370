"""OPPA: Bayesian optimisation over training configurations, by trials."""
