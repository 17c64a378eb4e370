"""Plugins: installed packages that register ops, passes, planners or collectives."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

GROUP = "shardweave.plugins"
"""Entry points of packages: each names a module, which registers what it adds as it is imported."""


@cache
def load_plugins() -> None:
    """Import the modules that installed packages name as plugins, once in a process. Raises
    ValueError with the plugin and its package if one fails."""
    for plugin in sorted(entry_points(group=GROUP), key=lambda plugin: plugin.name):
        try:
            plugin.load()
        except (Exception, SystemExit) as error:
            package = plugin.dist.name if plugin.dist else "an unknown package"
            raise ValueError(
                f"the plugin '{plugin.name}' ({plugin.value}) of {package} fails: "
                f"{type(error).__name__}: {error}. Mend the package, or uninstall it."
            ) from error
