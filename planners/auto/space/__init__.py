"""The search space of `auto`: its dimensions, candidate values, and a user's constraints."""
