"""Pages looked at in a real browser, where there is one."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from collections import Counter
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium found; on Debian: apt install chromium"
)

SCHEMES = {"dark": "0", "light": "1"}
"""The values of Chromium's setting."""


def browse(page: Path, *options: str) -> tuple[str, str]:
    """The page's document after a browser has drawn it, and what the browser's console says."""
    assert BROWSER is not None
    profile = page.parent / "profile"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def picture_of(address: str, folder: Path, size: tuple[int, int], scheme: str) -> Image.Image:
    """What a browser draws at an address, in pixels. folder: for its files. size: width, height."""
    width, height = size
    frame, out = folder / "frame.html", folder / "picture.png"
    # A frame, since a browser's own window may refuse to be narrow.
    frame.write_text(
        f'<!DOCTYPE html><body style="margin:0"><iframe src="{address}" width="{width}" '
        f'height="{height}" style="border:0;display:block"></iframe>'
    )
    browse(
        frame,
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--window-size={max(width, 600)},{height}",
        "--virtual-time-budget=10000",
        f"--screenshot={out}",
    )
    return Image.open(out).convert("RGB").crop((0, 0, width, height))


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture of a page in its 256 most frequent colours, which takes a third of the bytes.

    Areas keep their colours (to 1 of 255), which palettes of mean colours change.
    """
    pixels = picture.convert("RGB").tobytes()
    colours = Counter(zip(pixels[::3], pixels[1::3], pixels[2::3], strict=True)).most_common(256)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour, _ in colours for part in colour])
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"wrote {path} ({path.stat().st_size // 1024} KiB)")


def played(html: str, folder: Path, script: str, *, width: int, scheme: str) -> dict[str, Any]:
    """What a script finds in a page while it clicks through it, in a window of this width.

    script: the body of an async function of `w` and `d`, the page's window and document, that
    returns an object; `until(test)` waits. scheme: `light` or `dark`. Fails if the browser's
    console has anything to say.
    """
    probe = folder / f"probe-{scheme}-{width}.html"
    # A frame, since a browser's own window may refuse to be narrow.
    probe.write_text(
        f'<!DOCTYPE html><body><iframe id="f" width="{width}" height="900" '
        f'srcdoc="{escape(html, quote=True)}"></iframe><script>'
        "const until = async (test) => { while (!test())"
        " await new Promise((done) => setTimeout(done, 20)); };"
        f"async function play(w, d) {{ {script} }}"
        "f.onload = async () => {"
        " let found; try { found = await play(f.contentWindow, f.contentDocument); }"
        " catch (error) { found = { error: String(error.stack) }; }"
        " document.body.dataset.found = JSON.stringify(found); };</script>"
    )
    setting = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    window = f"--window-size={width + 120},1000"
    dom, said = browse(probe, setting, window, "--virtual-time-budget=30000", "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None, f"the script did not end; the console says:\n{said}"
    assert [line for line in said.splitlines() if "CONSOLE" in line] == []
    return json.loads(unescape(found[1]))


def data_of(html: str) -> dict[str, Any]:
    """The data that a page of the explorer holds, unpacked as a browser unpacks it."""
    packed = re.search(r'id="data">([^<]*)<', html)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def moment_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    """What such data has of the program after a pass."""
    return next(moment for moment in data["moments"] if moment["name"] == name)
