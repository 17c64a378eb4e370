"""Texts with mistakes: `python benchmarks/fuzz.py` changes all that people and files give.

Programs, plans, clusters, checkpoints, meshes, pipelines of passes, models' names and command lines
are mutated, character by character, word by word and in their structure, and used: a program is
parsed, verified, emitted, run, partitioned and run again; a plan is followed with validation; a
cluster is simulated on; a checkpoint is loaded; a command is run. Points of the whole plan space of
six models are lowered, verified and priced. What is accepted must mean one
thing (two ways of running it agree); all else is refused by a ValueError or OSError that the
package itself raises, or by a command in a few lines. Any other error, a hang, a death of the
process, or a file touched on the way is a finding.

`--count N` mutations of each kind (1,000 by default, 40 with `--quick`), `--kind` one of them,
`--seed`; `--only N` runs one case again, and shows its traceback. Exits 1 if anything was found.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from shardweave.benchmarks.fuzz_cases import clean, warm_up
from shardweave.benchmarks.fuzz_entries import KINDS
from shardweave.driver.checking.validate import ValidationError
from shardweave.driver.cli import PLAIN
from shardweave.passes.pipeline import PassError

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60
"""A case that takes longer hangs: of processor time, or 10 times that long by the clock."""

MEMORY_BYTES = 4 * 2**30
"""What a case may take beside what the process has before it."""

QUICK = 40

ACCEPTED, REFUSED, FOUND = "accepted", "refused", "found"


class HangError(BaseException):
    """A case takes too long."""


class FileTouchedError(BaseException):
    """A case opens a file that it was not given."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case. text: for a finding, what was raised, and where."""

    number: int
    kind: str
    text: str = ""
    where: str = ""


def run_case(name: str, seed: int, number: int) -> Outcome:
    """Make and use one mutation."""
    kind, rng = KINDS[name], random.Random(f"{name} {seed} {number}")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        text = kind.make(rng, folder)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        _Guard.allowed = str(folder) if kind.writes else ""
        os.environ["SHARDWEAVE_CACHE"] = str(folder / "cache")
        _Guard.is_on = True
        try:
            kind.use(text, folder)
        finally:
            _Guard.is_on = False
            signal.setitimer(signal.ITIMER_PROF, 0)
    except ValidationError as error:
        return Outcome(number, FOUND, f"ValidationError: {error}", text)
    except PLAIN as error:
        if _is_ours(error) and "left an invalid program" not in str(error):
            return Outcome(number, REFUSED, _described(error))
        return Outcome(number, FOUND, _described(error), text)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is a finding
        return Outcome(number, FOUND, _described(error), text)
    finally:
        clean(folder)
    return Outcome(number, ACCEPTED)


def _is_ours(error: BaseException) -> bool:
    """Whether the package raised an error itself, with words, rather than something that it called.

    A pass that fails is told by the pipeline; then it is the error in the pass that counts.
    """
    while isinstance(error, PassError) and error.__cause__ is not None:
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised = (last.line or "").startswith("raise")
    return is_raised and last.filename.startswith(str(ROOT)) and bool(str(error).strip())


def _described(error: BaseException) -> str:
    while isinstance(error, PassError) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(str(ROOT)) and f.name != "hook"]
    last = ours[-1] if ours else frames[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__} at {place}: {said[:200]}"


class _Guard:
    """Watches for files that are opened, and processes and sockets that are made."""

    is_on = False
    allowed = ""
    known: tuple[str, ...] = (
        str(ROOT), sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), "/proc", "/sys",
        "/dev/null", "/dev/urandom", "/usr", "/lib", "/etc",
    )  # fmt: skip

    @classmethod
    def hook(cls, event: str, args: tuple[Any, ...]) -> None:
        if not cls.is_on:
            return
        is_bad = event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect")
        if event == "open":
            path, mode = str(args[0]), str(args[1] or "")
            is_own = bool(cls.allowed) and os.path.abspath(path).startswith(cls.allowed)
            is_read = not set(mode) & set("wax+")
            is_bad = not (is_own or path.isdigit() or (is_read and path.startswith(cls.known)))
        elif event in ("os.remove", "os.rename", "os.mkdir", "shutil.rmtree"):
            is_own = os.path.abspath(str(args[0])).startswith(cls.allowed)
            is_bad = not (cls.allowed and is_own)
        if is_bad:
            cls.is_on = False
            raise FileTouchedError(f"{event} {args[:2]}")


def _alarm(number: int, frame: FrameType | None) -> None:
    raise HangError(f"no end after {LIMIT_S} s")


def work(pipe: Connection, name: str, seed: int, numbers: Sequence[int]) -> None:
    """Run cases one after the other, and tell of each before it begins and when it ends."""
    signal.signal(signal.SIGPROF, _alarm)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))
    sys.dont_write_bytecode = True  # what Python itself writes is no finding
    sys.addaudithook(_Guard.hook)
    for number in numbers:
        pipe.send(run_case(name, seed, number))
    pipe.close()


def outcomes(name: str, seed: int, numbers: Sequence[int]) -> Iterator[Outcome]:
    """The outcomes of cases, in processes of which the next one begins where one has died."""
    left = list(numbers)
    context = get_context("fork")
    while left:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, name, seed, left))
        process.start()
        theirs.close()
        try:
            while left and ours.poll(10 * LIMIT_S):
                outcome = ours.recv()
                left.remove(outcome.number)
                yield outcome
        except EOFError:
            process.join()
        if left:
            process.kill()
            process.join()
            yield Outcome(left.pop(0), FOUND, f"the process died or hung ({process.exitcode})")
        process.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kind", choices=[*KINDS], action="append")
    parser.add_argument("--count", type=int, default=0, help="mutations of each kind")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reasons", action="store_true", help="count where refusals are raised")
    parser.add_argument("--only", type=int, help="run this case alone, and show what it raises")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count, num_found = options.count or (QUICK if options.quick else 1000), 0
    for name in options.kind or KINDS:
        warm_up(name)
        if options.only is not None:
            return _show(name, options.seed, options.only)
        start_s, kinds, seen = time.perf_counter(), Counter[str](), Counter[str]()
        reasons = Counter[str]()
        for outcome in outcomes(name, options.seed, range(count)):
            kinds[outcome.kind] += 1
            if outcome.kind == REFUSED:
                reasons[" ".join(outcome.text.split()[:3]).rstrip(":")] += 1
            if outcome.kind == FOUND:
                seen[outcome.text] += 1
                if seen[outcome.text] == 1:
                    print(f"  {name} {outcome.number}: {outcome.text}", flush=True)
        num_found += kinds[FOUND]
        if options.reasons:
            print("\n".join(f"  {times} {reason}" for reason, times in reasons.most_common()))
        print(
            f"{name}: {count} mutations, {kinds[ACCEPTED]} accepted, {kinds[REFUSED]} refused, "
            f"{kinds[FOUND]} findings, {time.perf_counter() - start_s:.0f} s",
            flush=True,
        )
    return 1 if num_found else 0


def _show(name: str, seed: int, number: int) -> int:
    """Run one case here, and let what it raises through."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    text = KINDS[name].make(random.Random(f"{name} {seed} {number}"), folder)
    print(text)
    KINDS[name].use(text, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
