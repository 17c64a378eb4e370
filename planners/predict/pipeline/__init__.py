"""Simulation of pipelines, run by run, also extrapolated from models with fewer blocks."""
