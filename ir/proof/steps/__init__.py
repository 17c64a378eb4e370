"""The steps of a walk: moves, masks, local forms, attention over blocks of keys, partial sums."""
