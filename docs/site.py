"""What mkdocs does differently for these pages; `mkdocs.yml` names this file."""

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shardweave.docs.reference import PAGES

_SOURCE_LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./[^)\s]*|[\w/]+\.py)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that the code writes are made when the site is built."""
    for path, written in PAGES.items():
        files.append(File.generated(config, path, content=written()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to sources lead somewhere in a clone, and nowhere on a site: only their words stay."""
    return _SOURCE_LINK.sub(r"\1", markdown)
