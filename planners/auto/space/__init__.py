"""The space of plans that `auto` searches."""
