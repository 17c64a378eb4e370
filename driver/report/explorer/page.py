"""The explorer's page: one file, with its style, its scripts and its data packed within it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardweave.driver.report.explorer.part import Words
from shardweave.driver.report.html import document

_FOLDER = Path(__file__).parent
_SCRIPTS = ("data.js", "text.js", "rail.js", "program.js", "value.js", "main.js")
"""Script files, in the order in which the page joins them into one module."""

_KEYS = {
    "← → or k j": "the pass before, the next pass",
    "n p": "the next change, the one before",
    "o": "open or close all layers",
    "s": "side by side, or one below the other",
    "c": "layers with changes alone",
    "/": "search",
    "Esc": "close what is known of a value",
}


def explorer_page(moments: Sequence[dict[str, Any]], words: Words, *, title: str) -> str:
    """Build the self-contained page from a Recorder's moments and texts."""
    data = {"title": title, "words": words.texts, "moments": list(moments)}
    # Without a time in it, so that the same program gives the same page.
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    script = "\n".join((_FOLDER / name).read_text() for name in _SCRIPTS)
    body = (
        f"{_header(title)}"
        '<div class="columns"><nav id="rail" aria-label="passes"></nav>'
        '<main id="main"><p>Reading ...</p></main><aside id="value" hidden></aside></div>'
        f"{_help()}"
        f'<script type="text/plain" id="data">{base64.b64encode(packed).decode()}</script>'
        f'<script type="module">\n{script}</script>'
    )
    return document(title, body, more_style=(_FOLDER / "explorer.css").read_text())


def _header(title: str) -> str:
    return (
        f"<header><h1>{escape(title)}</h1>"
        '<div class="tools"><input type="search" id="search" aria-label="search" '
        'placeholder="layer:h.0 op:all_reduce axis:tensor">'
        '<button type="button" id="only">changes only</button>'
        '<button type="button" id="sides">side by side</button>'
        '<button type="button" id="all">open all</button>'
        '<button type="button" id="next">next change</button>'
        '<button type="button" id="keys" title="keys">?</button></div></header>'
    )


def _help() -> str:
    rows = "".join(
        f"<p><kbd>{escape(keys)}</kbd> {escape(what)}</p>" for keys, what in _KEYS.items()
    )
    words = (
        "Search finds lines with all of the words; <code>layer:</code>, <code>op:</code>, "
        "<code>axis:</code>, <code>phase:</code> and <code>is:added</code> look at one thing."
    )
    return (
        f'<dialog id="help"><h2>Keys</h2>{rows}<p>{words}</p>'
        '<form method="dialog"><button>close</button></form></dialog>'
    )
