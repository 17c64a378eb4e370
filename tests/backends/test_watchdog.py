"""Ranks that die, stop, fail, are late or do something else: the others end, and say so."""

from __future__ import annotations

import atexit
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from shardweave.backends import watchdog
from shardweave.backends.watch import SILENCE_S
from shardweave.driver import checkpoints
from shardweave.driver.checkpoint_files import complete
from shardweave.driver.compile import compile as compile_step
from shardweave.tests.shared_traces import share_traces
from shardweave.tests.spawn import importable, warm_context

NUM_RANKS = 3
TIMEOUT_S = 5.0
LIMIT_S = 120.0
"""Ranks that are not ready, or have not ended, after so long are killed: a fault of the test."""


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


def leave(rank: int, folder: Path) -> None:
    step = train(rank, folder, 5)
    if rank != 1:
        step(torch.ones(6, 4))


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
    from shardweave.driver.checkpoints import save_checkpoint

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
    from shardweave.backends.mail import Address, Mail
    from shardweave.planners.plan import Plan
    from shardweave.planners.plan_parts import Pipeline

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
        leave,
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


def stop_rank_2(pids: list[int]) -> None:
    os.kill(pids[2], signal.SIGSTOP)


def stop_rank_0(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGSTOP)


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
        stopped = [rank for rank, hit in ((0, stop_rank_0), (2, stop_rank_2)) if hit is self.hit]
        self.stopped = stopped[0] if stopped else None
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
        if self.ready_s is None:
            is_ready = len(list(self.folder.glob("ready*"))) == NUM_RANKS
            if not is_ready and now_s < self.start_s + LIMIT_S:
                return False
            self.ready_s = now_s
            if self.hit is not None:
                self.hit([process.pid or 0 for process in self.processes])
        self.took_s = now_s - self.ready_s
        waiting = [p for rank, p in enumerate(self.processes) if rank != self.stopped]
        return all(p.exitcode is not None for p in waiting) or self.took_s > LIMIT_S

    def end(self) -> None:
        """Leave no process."""
        self.codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.said = [log.read_text() for log in self.logs]


@pytest.fixture(scope="module")
def all_ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Scenario, Ranks]:
    """The ranks of every scenario of the tests here. They begin one after another, and wait at once."""
    items = [item for item in request.session.items if item.path == request.path]
    specs = [getattr(item, "callspec", None) for item in items]
    params = [spec.params for spec in specs if spec is not None]
    scenarios = list(dict.fromkeys(given["ended"] for given in params if "ended" in given))
    x = torch.ones(6, 4)
    compile_step(importable(Model)(), (x,), mesh=f"data={NUM_RANKS}", backend="reference")
    started: dict[Scenario, Ranks] = {}
    running: list[Ranks] = []
    try:
        while running or len(started) < len(scenarios):
            if len(started) < len(scenarios) and all(ranks.ready_s for ranks in running):
                scenario = scenarios[len(started)]
                folder = tmp_path_factory.mktemp(scenario.role.__name__)
                started[scenario] = Ranks(folder, scenario)
                running.append(started[scenario])
            running = [ranks for ranks in running if not ranks.is_over()]
            time.sleep(0.02)
    finally:
        for ranks in started.values():
            ranks.end()
    return started


@pytest.fixture
def ended(request: pytest.FixtureRequest, all_ended: dict[Scenario, Ranks]) -> Ranks:
    return all_ended[request.param]


def ranks_that(role: Callable[[int, Path], Any], hit: Hit | None = None) -> pytest.MarkDecorator:
    """A test of how they end."""
    name = role.__name__ if hit is None else hit.__name__
    return pytest.mark.parametrize("ended", [Scenario(role, hit)], ids=[name], indirect=True)


POSITION = "at dist.start_all_reduce"


@ranks_that(train, kill_rank_1)
def test_ranks_end_and_name_one_that_was_killed(ended: Ranks) -> None:
    assert ended.codes == [1, -signal.SIGKILL, 1]
    assert ended.took_s < 2 * TIMEOUT_S
    for rank in (0, 2):
        assert "rank 1 (process " in ended.said[rank]
        assert "has given no sign of life" in ended.said[rank]
        assert f"Rank {rank} waited" in ended.said[rank]
        assert POSITION in ended.said[rank]
        assert "test_watchdog.py" in ended.said[rank]
        assert "rank 1" in (ended.folder / f"error{rank}.json").read_text()


@ranks_that(die_in_a_pipeline)
def test_stages_end_and_say_at_which_micro_batch_they_waited_for_what(ended: Ranks) -> None:
    assert ended.codes == [1, -signal.SIGKILL, 1]
    waited = {
        0: ("which stage 1 sends", "in backward_0 of stage 0, micro-batch 1"),
        2: ("which stage 1 sends", "in forward_2 of stage 2, micro-batch 2"),
    }
    for rank, texts in waited.items():
        for text in ("rank 1 (process ", "has given no sign of life", "dist.recv", *texts):
            assert text in ended.said[rank]
        assert "micro-batch" in (ended.folder / f"error{rank}.json").read_text()


@ranks_that(train, stop_rank_2)
def test_ranks_end_and_name_one_that_was_stopped(ended: Ranks) -> None:
    assert ended.codes == [1, 1, None]
    assert ended.took_s < 3 * TIMEOUT_S
    for rank in (0, 1):
        assert "rank 2 (process " in ended.said[rank]
        assert POSITION in ended.said[rank]


@ranks_that(train_by_the_store_of_rank_0, stop_rank_0)
def test_ranks_end_if_rank_0_is_stopped_with_the_store_that_it_keeps(ended: Ranks) -> None:
    assert ended.codes == [None, 1, 1]
    assert ended.took_s < 4 * TIMEOUT_S
    for rank in (1, 2):
        assert "rank 0, which keeps torch.distributed's store, has not answered" in ended.said[rank]
        assert POSITION in ended.said[rank]


@ranks_that(fail)
def test_ranks_end_with_the_error_of_one_that_failed(ended: Ranks) -> None:
    assert ended.codes == [1, 1, 1]
    for rank in (0, 2):
        assert "rank 1 failed: ValueError: no more data. Rank" in ended.said[rank]


@pytest.mark.slow
@ranks_that(be_late)
def test_ranks_end_and_say_where_one_is_that_is_late(ended: Ranks) -> None:
    for rank in (0, 2):
        assert ended.codes[rank] == 1
        assert f"no answer within {TIMEOUT_S:g} s" in ended.said[rank]
        assert "rank 1 is at" in ended.said[rank]
        assert "(be_late) in call 5" in ended.said[rank]


@pytest.mark.slow
@ranks_that(leave)
def test_ranks_end_and_name_one_that_has_left(ended: Ranks) -> None:
    assert ended.codes == [1, 0, 1]
    for rank in (0, 2):
        assert "rank 1 ended the program" in ended.said[rank]


@pytest.mark.parametrize(
    ("ended", "rank", "mine", "others"),
    [
        (Scenario(take_a_short_batch), 1, "x (3, 4) float32 in training", "x (6, 4)"),
        (Scenario(evaluate), 2, "x (6, 4) float32 in evaluation", "in training"),
    ],
    ids=["take_a_short_batch", "evaluate"],
    indirect=["ended"],
)
def test_ranks_that_call_differently_all_stop_and_name_both(
    ended: Ranks, rank: int, mine: str, others: str
) -> None:
    assert ended.codes == [1, 1, 1]
    assert ended.took_s < 3 * TIMEOUT_S
    for said in ended.said:
        assert f"ranks differ in the call: rank {rank} has {mine}" in said
        assert others in said


CALL = "x (6, 4) float32 in training"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Scenario(compile_alone), ["in sw.compile: rank 1 has a model, rank", "runs call", CALL]),
        (
            Scenario(compile_alone_at_first),
            ["in what they do: ranks 0, 2 have the call: ", CALL, "rank 1 has sw.compile: a model"],
        ),
        (
            Scenario(compile_ahead_alone),
            ["in what they do: ranks 0, 2 have the call: x (3, 4)", "1 has step.compile_for: x (3"],
        ),
        (Scenario(save_alone), ["in sw.save_checkpoint: rank 1 has checkpoint 1, rank", CALL]),
        (
            Scenario(save_and_gather),
            ["ranks 0, 2 have step.full_state_dict", "rank 1 has sw.save_checkpoint"],
        ),
    ],
    ids=lambda value: value.role.__name__ if isinstance(value, Scenario) else "",
    indirect=["ended"],
)
def test_ranks_that_are_at_different_things_all_stop_and_name_both(
    ended: Ranks, words: list[str]
) -> None:
    assert ended.codes == [1, 1, 1]
    assert ended.took_s < 3 * TIMEOUT_S
    for said in ended.said:
        assert "ranks differ in " in said
        for word in words:
            assert word in said


@ranks_that(save_at_the_end)
def test_rank_that_saves_alone_ends_and_names_one_that_has_left(ended: Ranks) -> None:
    assert ended.codes == [0, 1, 0]
    assert re.search(r"rank [02] ended the program. Rank 1 waited to agree", ended.said[1])


@ranks_that(take_a_known_short_batch)
def test_ranks_stop_that_ran_different_programs_which_all_know(ended: Ranks) -> None:
    assert ended.codes == [1, 1, 1]
    for said in ended.said:
        # Compared every 16 calls, as often as ranks come to write down where they are.
        assert re.search(r"have run different programs in call (16|32|48|64) or before it", said)


@pytest.mark.slow
@ranks_that(die_while_saving)
def test_rank_that_dies_while_it_saves_is_named_and_the_last_checkpoint_stays(ended: Ranks) -> None:
    assert ended.codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert "rank 1 (process" in ended.said[rank]
    assert list(complete(ended.folder)) == [1]


@pytest.mark.slow
@ranks_that(sum_outside)
def test_collective_outside_a_step_is_named_by_the_line_that_calls_it(ended: Ranks) -> None:
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    for rank in (1, 2):
        assert "rank 0 (process" in ended.said[rank]
        assert "torch.distributed.all_reduce, called at" in ended.said[rank]
        assert "test_watchdog.py" in ended.said[rank]


@pytest.mark.slow
@ranks_that(wait_for_the_device)
def test_rank_that_waits_for_its_gpu_ends_as_well(ended: Ranks) -> None:
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    assert ended.took_s < 4 * TIMEOUT_S
    for rank in (1, 2):
        assert "rank 0 (process" in ended.said[rank]
        assert "(wait_for_the_device)" in ended.said[rank]


def test_silence_is_short() -> None:
    assert SILENCE_S <= 10
