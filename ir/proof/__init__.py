"""The static proof: that the program of one rank computes the model's (docs/proof.md).

A second, independent reading of the ops. It shares op definitions and factor rules with the passes,
but uses neither the passes nor propagation, assignment and resharding.
"""
