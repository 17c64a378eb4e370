"""The pictures of docs/explore.md: pages of the explorer in headless Chromium.

    python docs/explore/pictures.py [NAME ...]

The models have no weights, so that GPT-3 needs no memory for them; it takes minutes all the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from torch._subclasses.fake_tensor import FakeTensorMode

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.tests.browser import SCHEMES, picture_of, save_picture

FOLDER = Path(__file__).parent
PAGES = {
    "gpt": (
        "gpt:layers=4,hidden=256,heads=4,vocab=1024,seq=128,batch=8",
        "data=2,tensor=2",
        "plan-megatron,preset:oases",
        "oases-3090",
    ),
    "unet": (
        "unet:channels=64,size=32,batch=8,levels=3,groups=8,heads=8",
        "data=2,tensor=2",
        "plan-megatron,preset:default",
        "oases-3090",
    ),
    "gpt3": (
        "gpt:layers=96,hidden=12288,heads=96,vocab=51200,seq=2048,batch=16",
        "data=8,tensor=8",
        "plan-megatron,preset:oases",
        "h100-pod:nodes=8",
    ),
}
"""Model, mesh, passes and cluster."""

SHOTS = {
    "gpt": {"pass": "7", "open": "h.0 … h.3", "value": "7//%mm_1"},
    "unet": {"pass": "6", "q": "op:all_reduce"},
    "gpt3": {},
}
"""What of a page is shown: its address."""

SIZES = {1280: 860, 400: 860}


def page_of(name: str) -> str:
    """The page of one of the models."""
    model, mesh, passes, cluster = PAGES[name]
    with FakeTensorMode():
        example = build_example(model)
    program = sw.capture(example.module, kwargs=example.kwargs)
    return sw.explore(program, passes, cluster, mesh=mesh, title=name).html


def shoot(page: Path, name: str) -> None:
    """Write the pictures of a page in all widths and both schemes."""
    address = f"{page.as_uri()}#{urlencode(SHOTS[name])}"
    for width, height in SIZES.items():
        for scheme in SCHEMES:
            picture = picture_of(address, page.parent, (width, height), scheme)
            save_picture(picture, FOLDER / f"{name}-{width}-{scheme}.png")


def main() -> None:
    """Make the pictures of the named pages, or of all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in sys.argv[1:] or PAGES:
            page = folder / f"{model}.html"
            page.write_text(page_of(model))
            shoot(page, model)


if __name__ == "__main__":
    main()
