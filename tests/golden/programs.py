"""The captured programs of golden cases, most kept as text: any torch reads the same ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.tests import zoo
from shardweave.tests.golden.figures import Figures

FOLDER = Path(__file__).parent / "programs"

STORED = {
    "gpt": "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=8,batch=8",
    "deep": "gpt:layers=4,hidden=8,heads=2,vocab=16,seq=4,batch=8,tie=false",
    "dropout": "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=8,dropout=0.1",
    "slots": "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=8,experts=4,capacity=1",
    "llama": (
        "hf:llama:num_hidden_layers=1,hidden_size=16,num_attention_heads=8,num_key_value_heads=4,"
        "intermediate_size=32,vocab_size=32,batch=8,seq=16"
    ),
    "experts": "hf:mixtral:tiny,num_hidden_layers=1,batch=8,seq=4",
}
"""Models by the name of the file that holds the program of a training step."""

LIVE = {name: zoo.SPECS[name] for name in ("cnn", "unet", "t5")}
"""Models without a file, which are captured where they are used: their texts are long."""

MODELS = STORED | LIVE

CAPTURED = ("gpt", "dropout", "slots", "cnn", "unet", "t5")
"""Models whose capture is a case of its own."""

HALF = ("llama",)
"""Models with weights in bfloat16. Other stored models have float32, captured ones float64."""


@cache
def stored(name: str) -> Program:
    """Load a captured program, or capture it. The caller must not change it."""
    if name not in STORED:
        return captured(name)
    program = Program.load(FOLDER / f"{name}.mlir")
    check(program)
    return program


@cache
def captured(name: str) -> Program:
    """Capture a model's training step with this torch."""
    dtype = torch.float64 if name not in STORED else torch.float32
    dtype = torch.bfloat16 if name in HALF else dtype
    example = build_example(MODELS[name], dtype=dtype)
    return capture(example.module, kwargs=example.kwargs)


def capture_figures(name: str) -> Figures:
    """Figures of a capture: the text of the program, and whether the stored one is the same."""
    program = captured(name)
    return {"program": str(program), "is_stored": str(program) == str(stored(name))}


def write_programs() -> None:
    """Capture all models anew, and replace the stored programs."""
    for name in STORED:
        (FOLDER / f"{name}.mlir").write_text(str(captured(name)))
