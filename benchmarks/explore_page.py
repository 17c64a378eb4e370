"""How large an explorer page is, and how long a browser takes to open it:
`python benchmarks/explore_page.py [--quick] [--json FILE]`.

Two programs of about 10,000 ops for a rank: GPT-3's 96 layers, which are equal, so that the page
writes one of them; and a chain of layers of which no two are equal, so that it writes all. Each is
shown with the whole default pipeline. A page is opened from its file in headless Chromium; the time
runs from the start of the navigation to the first frame that has the program, on the browser's own
clock, and the median of several new browsers counts. Exits with 1 if a page is over its bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn, zeros
from torch._subclasses.fake_tensor import FakeTensorMode

import shardweave as sw
from shardweave.benchmarks.compile_time import machine
from shardweave.driver.models.models import Example, build_example
from shardweave.tests.browser import BROWSER

MESH = "data=8,tensor=8"
PASSES = "plan-megatron,preset:default"
CLUSTER = "h100-pod:nodes=8"
GPT = "gpt:layers={layers},hidden=12288,heads=96,vocab=51200,seq=2048,batch=16"
BOUND_MB, BOUND_S = 5.0, 2.0
"""Of a page: 10^6 bytes, and seconds until it can be read."""

LIMIT_S = 60.0
"""Seconds after which a browser that says nothing has failed."""

_MARK = "</head>"
_WATCH = """<script>
const look = () => document.documentElement.dataset.ready
  ? requestAnimationFrame(() => setTimeout(() => {
      new Image().src = "http://127.0.0.1:%d/" + performance.now();
    }))
  : setTimeout(look, 1);
look();
</script>"""


class Chain(nn.Module):
    """Feed-forward layers one behind the other, each of another width."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(64), nn.Linear(64, 64 + 8 * index), nn.GELU(),
                nn.Linear(64 + 8 * index, 64),
            )
            for index in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def equal_layers(scale: int) -> Example:
    return build_example(GPT.format(layers=96 // scale))


def distinct_layers(scale: int) -> Example:
    return Example(Chain(400 // scale), {"x": zeros(64, 64)})


PROGRAMS: dict[str, Callable[[int], Example]] = {
    "GPT-3, 96 equal layers": equal_layers,
    "400 layers, no two equal": distinct_layers,
}
"""By name, how to build the model: with all layers, or with a share of them."""


@dataclass(frozen=True)
class Row:
    """A page: the ops of its last program, its bytes, and the seconds to open it."""

    name: str
    num_ops: int
    page_bytes: int
    opens_s: float

    @property
    def is_within_bounds(self) -> bool:
        return self.page_bytes <= BOUND_MB * 1e6 and self.opens_s <= BOUND_S


def measure(name: str, scale: int, repeat: int) -> Row:
    """Make the page of one model, and open it `repeat` times."""
    with FakeTensorMode():
        example = PROGRAMS[name](scale)
    program = sw.capture(example.module, kwargs=example.kwargs)
    page = sw.explore(program, PASSES, CLUSTER, mesh=MESH, title=name)
    with tempfile.TemporaryDirectory() as folder:
        times = [opening_s(page.html, Path(folder) / str(number)) for number in range(repeat)]
    num_ops = sum(1 for _ in page.program.ops)
    return Row(name, num_ops, len(page.html.encode()), statistics.median(times))


def opening_s(html: str, folder: Path) -> float:
    """Seconds from the start of the navigation to a page until a frame shows its program.

    Raises RuntimeError if the browser does not get there.
    """
    if BROWSER is None:
        raise RuntimeError("no chromium found; on Debian: apt install chromium")
    folder.mkdir()
    heard: list[float] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(float(self.path[1:]) / 1e3)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        server.timeout = LIMIT_S
        page = folder / "page.html"
        page.write_text(html.replace(_MARK, _WATCH % server.server_port + _MARK, 1))
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,860"]
        command += [f"--user-data-dir={folder / 'profile'}", page.as_uri()]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            server.handle_request()
        finally:
            browser.terminate()
            browser.wait()
    if not heard:
        raise RuntimeError(f"the page was not drawn within {LIMIT_S:.0f} s.")
    return heard[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON if asked."""
    options = _parser().parse_args(argv)
    scale, repeat = (16, 1) if options.quick else (1, options.repeat)
    with Console(stderr=True).status("making and opening pages"):
        rows = [measure(name, scale, repeat) for name in PROGRAMS]
    table = Table(title=f"at most {BOUND_MB:g} MB and {BOUND_S:g} s")
    for column in ("program", "ops of a rank", "MB", "opens in"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in rows:
        size = f"{row.page_bytes / 1e6:.1f}"
        table.add_row(row.name, f"{row.num_ops:,}", size, f"{row.opens_s:.2f} s")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    console.print(machine(), highlight=False)
    if options.json:
        report = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {options.json}")
    return int(not all(row.is_within_bounds for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure explorer pages in a browser.")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the layers, once")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="times (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
