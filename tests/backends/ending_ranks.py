"""Ranks of which one dies, stops, fails, is late or is at something else, and how all end."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from shardweave.backends.watch import watchdog
from shardweave.driver.training import checkpoints
from shardweave.tests.compiled import compile_copy as compile_step
from shardweave.tests.shared_traces import share_traces
from shardweave.tests.spawn import importable, warm_context

NUM_RANKS = 3
TIMEOUT_S = 5.0
START_LIMIT_S = 600.0
"""For so long ranks may come to be ready: on a busy machine the imports alone take minutes."""

LIMIT_S = 120.0
"""Ranks that have not ended so long after they were ready are killed."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def train(rank: int, folder: Path, num_steps: int = 10**6) -> Any:
    """Take steps, and say after a few that all is well. Returns the step."""
    x = torch.ones(6, 4)
    step = compile_step(Model(), (x,), mesh=f"data={NUM_RANKS}")
    for number in range(num_steps):
        step(x)
        if number == 2:
            (folder / f"ready{rank}").touch()
    return step


def train_by_the_store_of_rank_0(rank: int, folder: Path) -> None:
    """As `mp.spawn` and a script without torchrun do; see `store_for`."""
    train(rank, folder)


def fail(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    if rank == 1:
        raise ValueError("no more data")
    step(torch.ones(6, 4))


def be_late(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    if rank == 1:
        time.sleep(3 * TIMEOUT_S)
    step(torch.ones(6, 4))


STARVED_S = 13.0
"""Longer than a rank may be silent."""


def be_starved(rank: int, folder: Path) -> None:
    """Rank 1 runs, and for a while no thread of it does that could say so."""
    x = torch.ones(6, 4)
    step = compile_step(Model(), (x,), mesh=f"data={NUM_RANKS}", timeout=LIMIT_S)
    step(x)
    (folder / f"ready{rank}").touch()
    if rank == 1:
        ctypes.PyDLL(None).sleep(int(STARVED_S))  # keeps the interpreter's lock
    step(x)
    dist.barrier()


def leave(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    if rank != 1:
        step(torch.ones(6, 4))


def skip_a_call(rank: int, folder: Path) -> None:
    """Rank 1 leaves out a batch, and all go on."""
    step = train(rank, folder, 5)
    for number in range(10**6):
        if rank != 1 or number != 3:
            step(torch.full((6, 4), number / 1000))
            time.sleep(0.01)


def take_a_short_batch(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    step(torch.ones(3 if rank == 1 else 6, 4))


def evaluate(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    step.train(rank != 2)
    step(torch.ones(6, 4))


def take_a_known_short_batch(rank: int, folder: Path) -> None:
    """Once, the second time that there is one: no program is met first."""
    step = train(rank, folder, 5)
    step(torch.ones(3, 4))
    step(torch.ones(3 if rank == 1 else 6, 4))
    for _ in range(1000):
        step(torch.ones(6, 4))
        time.sleep(0.05)


def compile_alone(rank: int, folder: Path) -> None:
    train(rank, folder, 5 if rank == 1 else 10**6)
    train(rank, folder, 0)


def compile_alone_at_first(rank: int, folder: Path) -> None:
    """While the others are at a call that they agree on."""
    step = train(rank, folder, 0)
    (folder / f"ready{rank}").touch()
    if rank == 1:
        train(rank, folder, 0)
    step(torch.ones(6, 4))


def compile_ahead_alone(rank: int, folder: Path) -> None:
    """For the call that the others make, which compiles the same program."""
    step = train(rank, folder, 5)
    if rank == 1:
        step.compile_for(torch.ones(3, 4))
    step(torch.ones(3, 4))


def save_alone(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    if rank == 1:
        checkpoints.save_checkpoint(folder, 1, {"model": step})
    step(torch.ones(6, 4))


def save_and_gather(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    if rank == 1:
        checkpoints.save_checkpoint(folder, 1, {"model": step})
    step.full_state_dict()


def save_at_the_end(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    if rank == 1:
        checkpoints.save_checkpoint(folder, 1, {"model": step})


def die_while_saving(rank: int, folder: Path) -> None:
    from shardweave.driver.training.checkpoints import save_checkpoint

    step = train(rank, folder, 5)
    save_checkpoint(folder, 1, {"model": step})
    if rank == 1:
        checkpoints.save_tensors = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    save_checkpoint(folder, 2, {"model": step})


def sum_outside(rank: int, folder: Path) -> None:
    train(rank, folder, 5)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def wait_for_the_device(rank: int, folder: Path) -> None:
    """As a rank on a GPU waits: in a line of the user's, such as `loss.item()`."""
    train(rank, folder, 5)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    watch = watchdog.start()
    assert watch is not None
    watch.on_gpu = True
    time.sleep(60)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu()).square().mean()


def die_in_a_pipeline(rank: int, folder: Path) -> None:
    """The stage in the middle is gone when the third micro-batch comes to it."""
    from shardweave.backends.distributed.mail import Address, Mail
    from shardweave.planners.plan.plan import Plan
    from shardweave.planners.plan.plan_parts import Pipeline

    pipeline = Pipeline((("first",), ("second",), ("third",)), 3)
    x = torch.ones(6, 4)
    step = compile_step(Deep(), (x,), plan=Plan(mesh={"stage": NUM_RANKS}, pipeline=pipeline))
    receive = Mail.receive

    def receive_or_die(self: Mail, rank: int, address: Address) -> Tensor:
        if address[0] == 0 and address[3] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(self, rank, address)

    step(x)
    if rank == 1:
        Mail.receive = receive_or_die
    (folder / f"ready{rank}").touch()
    step(x)


def store_for(rank: int, folder: Path, name: str) -> Store:
    """The store by which the ranks of a role join: a file, or a server that rank 0 has."""
    if name != train_by_the_store_of_rank_0.__name__:
        return FileStore(str(folder / "store"), NUM_RANKS)
    port = folder / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, NUM_RANKS, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(port.read_text()), NUM_RANKS)


def live(rank: int, folder: str, name: str) -> None:
    """The life of a rank, as the interpreter would end it."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "SHARDWEAVE_TIMEOUT": str(TIMEOUT_S),
        "TORCHELASTIC_ERROR_FILE": str(Path(folder) / f"error{rank}.json"),
    }
    log = os.open(Path(folder) / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    share_traces()
    store = store_for(rank, Path(folder), name)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    code = 0
    try:
        ROLES[name](rank, Path(folder))
    except BaseException:  # noqa: BLE001  it is the interpreter's part to say what it is
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        code = 1
    atexit._run_exitfuncs()
    os._exit(code)


ROLES: dict[str, Callable[[int, Path], Any]] = {
    role.__name__: role
    for role in (
        train,
        train_by_the_store_of_rank_0,
        fail,
        be_late,
        be_starved,
        leave,
        skip_a_call,
        take_a_short_batch,
        take_a_known_short_batch,
        evaluate,
        compile_alone,
        compile_alone_at_first,
        compile_ahead_alone,
        save_alone,
        save_and_gather,
        save_at_the_end,
        sum_outside,
        die_while_saving,
        die_in_a_pipeline,
        wait_for_the_device,
    )
}


Hit = Callable[[list[int]], None]


def kill_rank_1(pids: list[int]) -> None:
    os.kill(pids[1], signal.SIGKILL)


def kill_rank_0(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGKILL)


def stop_rank_2(pids: list[int]) -> None:
    os.kill(pids[2], signal.SIGSTOP)


def stop_rank_0(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGSTOP)


def stop_rank_0_and_kill_rank_2(pids: list[int]) -> None:
    """Rank 1 sees a broken connection, and asks rank 0's store why it broke."""
    stop_rank_0(pids)
    os.kill(pids[2], signal.SIGKILL)


STOPPED: dict[Hit | None, int] = {stop_rank_0: 0, stop_rank_0_and_kill_rank_2: 0, stop_rank_2: 2}
"""The rank that a hit stops, and that does not end by itself."""


@dataclass(frozen=True)
class Scenario:
    """role: what the ranks do. hit: what befalls them once all are ready."""

    role: Callable[[int, Path], Any]
    hit: Hit | None = None


class Ranks:
    """The ranks of a scenario, and how they ended.

    codes: their exit codes; said: what each said last; took_s: since they were ready.
    """

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.folder, self.hit = folder, scenario.hit
        self.stopped = STOPPED.get(scenario.hit)
        self.processes = [
            warm_context().Process(
                target=importable(live), args=(rank, str(folder), scenario.role.__name__)
            )
            for rank in range(NUM_RANKS)
        ]
        self.logs = [folder / f"log{rank}" for rank in range(NUM_RANKS)]
        for log in self.logs:
            log.touch()  # a rank may end before it opens its own
        self.start_s = time.monotonic()
        self.ready_s: float | None = None
        self.took_s = math.inf
        for process in self.processes:
            process.start()

    def is_over(self) -> bool:
        """Look at the ranks, which must be done often."""
        now_s = time.monotonic()
        if self.ready_s is None and len(list(self.folder.glob("ready*"))) == NUM_RANKS:
            self.ready_s = now_s
            if self.hit is not None:
                self.hit([process.pid or 0 for process in self.processes])
        waiting = [p for rank, p in enumerate(self.processes) if rank != self.stopped]
        have_ended = all(process.exitcode is not None for process in waiting)
        if self.ready_s is None:
            return have_ended or now_s > self.start_s + START_LIMIT_S
        self.took_s = now_s - self.ready_s
        return have_ended or self.took_s > LIMIT_S

    def end(self) -> None:
        """Leave no process."""
        self.codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.said = [log.read_text() for log in self.logs]
