"""Two runs that save into one folder: no complete checkpoint mixes them.

`python benchmarks/two_runs.py [--trials 50] [--seed 0]`: two processes save checkpoints of the same
numbers into one folder, each with values of its own, at random distances, until both are done. Then
every complete checkpoint is loaded: its parameters and its value must be of the same run. A refusal
must name the run that holds the folder. In every third trial one of the runs is killed meanwhile.
Prints the checkpoints of each run, the refusals and the mixed ones; exits 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardweave as sw
from shardweave.driver.training.checkpoint_files import complete

NUM_SAVES = 20
REFUSED = re.compile(r"process \d+ on .* is saving into this folder|took over this save")


class Wide(nn.Module):
    """A model whose checkpoint takes several milliseconds to write."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 2048), nn.Linear(2048, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()).square().mean()


def compiled() -> Any:
    """A step of four virtual ranks."""
    return sw.compile(Wide(), (torch.randn(8, 8),), mesh="data=2,tensor=2", backend="reference")


def save(model: Any, who: int, folder: str, seed: int) -> None:
    """Save checkpoints 1 to `NUM_SAVES` of run `who`; each error goes into a file of the run."""
    warnings.simplefilter("ignore")  # a stale lock of a killed run is taken over, and said
    rng = random.Random(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(who)
    for number in range(1, NUM_SAVES + 1):
        time.sleep(rng.choice((0, 0, 0.002, 0.01)))
        try:
            sw.save_checkpoint(f"{folder}/saved", number, {"model": model, "who": who})
        except sw.CheckpointError as error:
            with Path(folder, f"refused-{who}").open("a") as file:
                file.write(" ".join(str(error).split()) + "\n")


def trial(model: Any, seed: int) -> Counter[str]:
    """Run two runs in one folder, and count what is in it afterwards."""
    rng, counts, context = random.Random(seed), Counter[str](), get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            context.Process(target=save, args=(model, who, folder, rng.random())) for who in (1, 2)
        ]
        for run in runs:
            run.start()
        if seed % 3 == 2:
            time.sleep(rng.uniform(0.02, 0.4))
            os.kill(rng.choice(runs).pid or 0, signal.SIGKILL)
            counts["killed"] += 1
        for run in runs:
            run.join()
        for path in Path(folder).glob("refused-*"):
            for line in path.read_text().splitlines():
                counts["refused" if REFUSED.search(line) else f"unclear: {line[:200]}"] += 1
        for number in complete(Path(folder, "saved")):
            loaded = sw.load_checkpoint(f"{folder}/saved", {"model": model}, number=number)
            assert loaded is not None
            values = {float(value) for p in model.parameters() for value in p.detach().unique()}
            who = loaded.values["who"]
            counts[f"of run {who}" if values == {who} else "mixed"] += 1
    return counts


def main() -> int:
    """Run the trials and print the counts. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked
    model, counts = compiled(), Counter[str]()
    for number in range(options.trials):
        counts += trial(model, options.seed + number)
    print(f"{options.trials} trials: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return int(any(what.startswith(("mixed", "unclear")) for what in counts))


if __name__ == "__main__":
    sys.exit(main())
