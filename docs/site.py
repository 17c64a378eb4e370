"""What mkdocs does differently for these pages; `mkdocs.yml` names this file."""

import re
from typing import Any

_SOURCE_LINK = re.compile(r"\[([^\]]*)\]\(\.\./[^)\s]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to sources lead somewhere in a clone, and nowhere on a site: only their words stay."""
    return _SOURCE_LINK.sub(r"\1", markdown)
