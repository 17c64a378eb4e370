"""Ranks that do not come, stop, die or skip a call: the others end in time, and name the cause.

Each case starts two processes as a person does without torchrun, with RANK, WORLD_SIZE and an
address in the environment, and gives them `timeout=20`. The rank that something befalls does it to
itself, at a moment of a training run: `kills.py` runs all cases.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 20
LIMIT_S = 60
"""Once all have imported torch: `TIMEOUT_S`, the watchdog's silence, and a machine that is busy."""

IMPORT_LIMIT_S = 300

NUM_RANKS = 2
NUM_STEPS = 400
SAVED = 150
"""After so many steps, when a rank that skipped a call has been noticed."""


@dataclass(frozen=True)
class Case:
    """What befalls a rank, and what the others are to say.

    does: by rank, "ACT MOMENT", such as "stop joining"; "absent" for a rank that is not started.
    says: a pattern that the text of each rank in `tells` matches. port: whether another program has
    the port. codes: exit codes of the ranks that end; 1 for those that are not named.
    """

    name: str
    does: Mapping[int, str] = field(default_factory=dict[int, str])
    says: str = ""
    tells: tuple[int, ...] = (0, 1)
    port: bool = False


MOMENTS = ("before", "connecting", "joining", "compiling", "step", "saving")


def _cases() -> Iterator[Case]:
    yield Case("rank 1 is never started", {1: "absent"}, r"rank 1 of 2 did not join at 127", (0,))
    yield Case("rank 0 is never started", {0: "absent"}, r"rank 0 of 2 did not join at 127", (1,))
    yield Case(
        "another program has the port",
        says=r"rank 0 cannot listen at .*EADDRINUSE|rank 0 of 2 did not join at 127",
        port=True,
    )
    for victim in (0, 1):
        for moment in MOMENTS:
            name, other = f"rank {victim} is stopped {moment}", (1 - victim,)
            says = rf"rank {victim}(,| \(process| of 2)"
            yield Case(name, {victim: f"stop {moment}"}, says, other)
        for moment in ("joining", "compiling", "step", "saving"):
            name, other = f"rank {victim} is killed {moment}", (1 - victim,)
            yield Case(name, {victim: f"kill {moment}"}, rf"rank {victim}(,| \(process)", other)
        yield Case(
            f"rank {victim} skips one call",
            {victim: "skip step"},
            r"have run different programs in call \d+ or before it, or had different batches",
        )


CASES = tuple(_cases())


# One rank


def live(does: str, folder: str) -> None:
    """Train as one rank, and do to it what befalls it."""
    import torch
    import torch.distributed as dist

    import shardweave as sw
    from shardweave.driver.processes import rendezvous
    from shardweave.driver.step import compile
    from shardweave.driver.training import checkpoints

    Path(folder, f"ready{os.environ['RANK']}").touch()
    while not Path(folder, "go").exists():  # a busy machine may take one rank longer to import
        time.sleep(0.05)
    act, _, moment = does.partition(" ")
    signals = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}

    def befall(at: str) -> None:
        if at == moment and act in signals:
            os.kill(os.getpid(), signals[act])

    def befalling(owner: Any, name: str, at: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            befall(at)
            return call(*args, **kwargs)

        setattr(owner, name, wrapped)

    befalling(rendezvous, "meet_in", "connecting")
    befalling(dist, "init_process_group", "joining")
    befalling(compile, "CompiledPrograms", "compiling")
    befalling(checkpoints, "save_tensors", "saving")
    befall("before")
    x, model = torch.ones(8, 64), torch.nn.Linear(64, 64)
    step = sw.compile(_with_loss(model), (x,), mesh=f"data={NUM_RANKS}", timeout=TIMEOUT_S)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    for number, x in enumerate(torch.ones(NUM_STEPS, 8, 64).cumsum(0) / NUM_STEPS):
        if number == 5:
            befall("step")
        if number == 5 and act == "skip":
            continue
        step(x).backward()
        time.sleep(0.02)  # the next batch
        optimizer.step()
        if number == SAVED:
            checkpoints.save_checkpoint(folder, number, {"model": step})


def _with_loss(model: Any) -> Any:
    """A module of the model's loss, for which torch is imported late."""
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model(x).square().mean()

    return Loss()


# All ranks


@dataclass(frozen=True)
class Ended:
    """How ranks ended. took_s: from when all are ready to the end of the last rank that
    tells; problem: what is not as it should be, or empty."""

    case: Case
    took_s: float
    said: dict[int, str]
    problem: str


def run(case: Case) -> Ended:
    """Start the ranks of a case, and see how they end."""
    with socket.socket() as held, tempfile.TemporaryDirectory() as folder:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        if case.port:
            held.listen()
        else:
            held.close()
        environment = os.environ | {
            "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        logs = {rank: Path(folder, f"log{rank}") for rank in range(NUM_RANKS)}
        processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(NUM_RANKS):
            if case.does.get(rank) != "absent":
                with logs[rank].open("w") as log:
                    processes[rank] = subprocess.Popen(
                        [sys.executable, __file__, case.does.get(rank, ""), folder],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                    )
        until_s = time.monotonic() + IMPORT_LIMIT_S
        while (
            len(list(Path(folder).glob("ready*"))) < len(processes) and time.monotonic() < until_s
        ):
            time.sleep(0.1)
        Path(folder, "go").touch()
        start_s = time.monotonic()
        codes = {rank: _code(processes[rank], start_s + LIMIT_S) for rank in case.tells}
        took_s = time.monotonic() - start_s
        for process in processes.values():
            process.kill()
            process.wait()
        said = {rank: logs[rank].read_text() for rank in logs if logs[rank].exists()}
    return Ended(case, took_s, said, _problem(case, codes, said))


def _code(process: subprocess.Popen[bytes], until_s: float) -> int | None:
    try:
        return process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _problem(case: Case, codes: Mapping[int, int | None], said: Mapping[int, str]) -> str:
    for rank, code in codes.items():
        last = (said[rank].strip().splitlines() or ["nothing"])[-1]
        if code is None:
            return f"rank {rank} did not end in {LIMIT_S} s; it said last: {last}"
        if code == 0 or not re.search(case.says, said[rank]):
            return f"rank {rank} ended with {code} and does not name the cause: {last}"
    return ""


if __name__ == "__main__":
    live(*sys.argv[1:])
