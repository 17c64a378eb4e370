"""The whole path on two real transformers: captured, sharded over four processes, compared.

`make demo` runs it. It exits 0 only if loss and all gradients equal those of eager PyTorch. It
leaves a page for a browser, which shows what each pass did, and says what to try next.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.driver.cli import main as shardweave

MESH = "data=2,tensor=2"
MODELS = {
    "Llama": (
        "hf:llama:num_hidden_layers=2,hidden_size=64,num_attention_heads=4,"
        "num_key_value_heads=2,intermediate_size=128,vocab_size=128"
    ),
    "GPT-2": "hf:gpt2:n_layer=2,n_embd=64,n_head=4,vocab_size=128,n_positions=32",
}
EXPLORED = "GPT-2"
PASSES = "plan-megatron,preset:oases"
CLUSTER = "oases-3090"
OUTPUT = Path(__file__).resolve().parent.parent / "build" / "demo"
TIME_LIMIT_S = "900"  # a busy machine of two cores took more than 240
SHOWN_OPS = ("aten.mm", "aten.addmm", "aten._scaled_dot_product")
SHOWN_LINES = 5
SHOWN_COLUMNS = 130


def run(name: str, model: str, folder: Path) -> dict[str, Any] | None:
    """Capture a model and show some of it, then run and check it; None if it did not run."""
    print(f"\n== {name}: capture")
    program = folder / f"{name}.mlir"
    if shardweave(["capture", model, "--dtype", "float64", "-o", str(program)]) != 0:
        return None
    lines = program.read_text().splitlines()
    for line in [line for line in lines if any(op in line for op in SHOWN_OPS)][:SHOWN_LINES]:
        print("   " + line.split(" loc(")[0].strip()[:SHOWN_COLUMNS])
    print(f"\n== {name}: run on mesh {MESH}")
    report = folder / f"{name}.json"
    how = ["--mesh", MESH, "--plan", "megatron", "--dtype", "float64", "--check"]
    code = shardweave(["run", model, *how, "--json", str(report), "--time-limit", TIME_LIMIT_S])
    found = json.loads(report.read_text()) if report.exists() else None
    return None if found is None else found | {"equal": found["equal"] and code == 0}


def explore(folder: Path) -> bool:
    """Write the page of one model's passes; whether that worked."""
    print(f"\n== {EXPLORED}: what each pass does")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    program, page = str(folder / f"{EXPLORED}.mlir"), str(OUTPUT / "explore.html")
    how = ["--mesh", MESH, "--passes", PASSES, "--cluster", CLUSTER]
    return shardweave(["explore", program, *how, "-o", page]) == 0


def say_what_is_next() -> None:
    """The page to open, and three commands."""
    command = f"{Path(sys.executable).parent / 'shardweave'}"
    print(
        f"\nOpen {(OUTPUT / 'explore.html').as_uri()} in a browser, and try next:\n"
        f"  {command} run gpt:layers=2,hidden=64 --mesh {MESH} --check --steps 5\n"
        f"  {command} plan gpt:layers=8,hidden=1024 --cluster {CLUSTER} --explain\n"
        f"  {command} --help"
    )


def main() -> int:
    """Run every model; 0 if all are equal to eager."""
    table = Table("model", "loss", "eager loss", "gradient error", "equal to eager", box=None)
    all_equal = True
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        for name, model in MODELS.items():
            found = run(name, model, folder)
            is_equal = found is not None and found["equal"] is True
            all_equal = all_equal and is_equal
            if found is None:
                table.add_row(name, "-", "-", "-", "did not run")
                continue
            table.add_row(
                name,
                f"{found['loss']:.12f}",
                f"{found['eager_loss']:.12f}",
                f"{found['max_rel_grad_error']:.1e}",
                "yes" if is_equal else "NO",
            )
        all_equal = all_equal and explore(folder)
    print(f"\nFour processes on mesh {MESH}, float64:")
    Console().print(table)
    if all_equal:
        say_what_is_next()
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
