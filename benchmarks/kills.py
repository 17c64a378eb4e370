"""A training that is killed at random steps ends as one that is not.

`python benchmarks/kills.py [--quick] [--json FILE]`: examples/train.py on four processes under
`torchrun --max-restarts`. At ten random steps a random one of its processes gets SIGKILL. Each
time torchrun starts all of them anew, and they go on from the last complete checkpoint. Every loss,
those of the steps that are taken again too, and the files of the last checkpoint are to be those of
a run that was left alone, bit for bit.

Then the cases of `waits.py`, each with two processes without torchrun: a rank that does not come,
stops, dies or skips a call, and a port that is taken. Every other rank is to end in time, and to
name the cause. `--only NAME` runs the cases with these words in their names, and no training.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardweave.benchmarks.compile_time import machine
from shardweave.benchmarks.training_runs import TrainingRun, sharded
from shardweave.benchmarks.waits import CASES, Case
from shardweave.benchmarks.waits import run as run_case

MESH = "data=2,tensor=2"


@dataclass(frozen=True)
class Kill:
    """A process was killed once a step was said to be done; the run went on with another step."""

    after_step: int
    worker: int
    resumed_at: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two kills in 20 steps")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--json", default="", help="write what happened to this file")
    parser.add_argument("--only", metavar="NAME", help="the cases with these words, no training")
    options = parser.parse_args()
    if options.only is not None:
        return 1 if waits_of([case for case in CASES if options.only in case.name]) else 0
    num_steps, save_every, num_kills = (20, 5, 2) if options.quick else (100, 10, 10)
    with tempfile.TemporaryDirectory() as folder:
        common = ["--steps", str(num_steps), "--show-every", "1", "--save-every", str(save_every)]
        left_alone = sharded([*common, "--checkpoint", f"{folder}/left-alone"], MESH)
        left_alone.finish()
        run = sharded([*common, "--checkpoint", f"{folder}/killed"], MESH, max_restarts=num_kills)
        kills = killed(run, num_steps, num_kills, random.Random(options.seed))
        names = [Path(folder, name, f"checkpoint-{num_steps}") for name in ("left-alone", "killed")]
        files = [data_of(name) for name in names]
    for kill in kills:
        print(
            f"rank {kill.worker} killed after step {kill.after_step}: "
            f"on with step {kill.resumed_at}"
        )
    problems = problems_of(left_alone, run, kills, save_every)
    if files[0] != files[1]:
        problems.append("the last checkpoints differ")
    last = run.losses[num_steps]
    print(f"final loss {last}, {left_alone.losses[num_steps]} if left alone")
    print("\n".join(problems) or "every loss and the last checkpoint are the same, bit for bit")
    problems += waits_of(CASES[:: len(CASES) // 5] if options.quick else CASES)
    if options.json:
        found = {
            "machine": machine(),
            "mesh": MESH,
            "steps": num_steps,
            "save_every": save_every,
            "kills": [asdict(kill) for kill in kills],
            "final_loss": last,
            "final_loss_left_alone": left_alone.losses[num_steps],
            "problems": problems,
        }
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 1 if problems else 0


def waits_of(cases: Sequence[Case]) -> list[str]:
    """Run cases, print how each ended, and return what is not as it should be."""
    problems: list[str] = []
    for case in cases:
        ended = run_case(case)
        print(f"{case.name}: {ended.problem or 'named'} after {ended.took_s:.0f} s", flush=True)
        problems += [f"{case.name}: {ended.problem}"] if ended.problem else []
    return problems


def killed(run: TrainingRun, num_steps: int, num_kills: int, chance: random.Random) -> list[Kill]:
    """Kill a process after each of some random steps, at a random moment; wait for the end."""
    kills: list[Kill] = []
    plan = sorted(chance.sample(range(1, num_steps), num_kills))
    killed_at: tuple[int, int] | None = None
    for step in run.lines():
        if killed_at is not None and len(run.starts) > len(kills) + 1:
            kills.append(Kill(*killed_at, resumed_at=run.starts[-1] + 1))
            killed_at = None
        if killed_at is None and plan and step >= plan[0]:
            plan.pop(0)
            killed_at = step, chance.randrange(4)
            time.sleep(chance.uniform(0, 1))
            run.kill_worker(killed_at[1])
    if run.process.wait() != 0:
        raise RuntimeError(f"the run ended with code {run.process.returncode}:\n{run.said()}")
    return kills


def problems_of(
    left_alone: TrainingRun, run: TrainingRun, kills: Sequence[Kill], save_every: int
) -> list[str]:
    """What is not as it should be."""
    found: list[str] = []
    for step, loss in run.said_losses:
        if left_alone.losses[step] != loss:
            found.append(f"step {step} has loss {loss}, not {left_alone.losses[step]}")
    for kill in kills:
        # A checkpoint may be complete before its step's line is read, or not yet when it is.
        lost = kill.after_step + 1 - kill.resumed_at
        if (kill.resumed_at - 1) % save_every or not -save_every <= lost <= 2 * save_every:
            found.append(f"on with step {kill.resumed_at} after step {kill.after_step}")
    if left_alone.validation[-1] != run.validation[-1]:
        found.append(f"validation loss {run.validation[-1]}, not {left_alone.validation[-1]}")
    return found


def data_of(checkpoint: Path) -> dict[str, bytes]:
    """The tensors of a checkpoint, by file."""
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.distcp"))}


if __name__ == "__main__":
    sys.exit(main())
