"""The static proof: that the program of one rank computes the model's (docs/proof.md).

A second reading of what the ops mean. It shares with the passes what an op is and its factor rule;
propagation, assignment, resharding and the passes are not asked.
"""
