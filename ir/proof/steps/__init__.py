"""The single steps of a walk: moves, masks, local forms, parts of attention and of sums."""
