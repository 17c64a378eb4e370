"""Passes change programs; `registry` and `presets` list them by name."""
