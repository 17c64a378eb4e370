"""Starting local processes: all end well, or all end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardweave.driver.processes.launch import WorkerError, launch

LINUX = sys.platform.startswith("linux")
REPORTS = "from shardweave.driver.processes.launch import report_failure; "


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time; rank = int(os.environ['RANK']); " + code]


def is_running(pid: int) -> bool:
    """Whether there is such a process; Linux keeps one that ended, as `Z`, for who started it."""
    try:
        os.kill(pid, 0)
        state = LINUX and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_every_rank_gets_the_environment_that_torchrun_gives(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    code = f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[n] for n in {names}))"
    launch(python(code), 3)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [
        "0 0 3 3",
        "1 1 3 3",
        "2 2 3 3",
    ]


def test_threads_are_divided_among_ranks_unless_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"open(f'{tmp_path}/{{rank}}', 'w').write(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("shardweave.driver.processes.launch.num_cores", lambda: 7)
    launch(python(code), 2)
    assert (tmp_path / "1").read_text() == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch(python(code), 2)
    assert (tmp_path / "1").read_text() == "5"


def test_only_the_output_of_rank_0_is_passed_through(capfd: pytest.CaptureFixture[str]) -> None:
    launch(python("print('said by', rank)"), 2)
    assert capfd.readouterr().out == "said by 0\n"


def test_failing_rank_is_named_with_its_last_words_and_the_others_are_stopped(
    tmp_path: Path,
) -> None:
    code = (
        f"open(f'{tmp_path}/{{rank}}', 'w').write(str(os.getpid())); "
        "rank != 1 and time.sleep(60); "
        f"[time.sleep(0.05) for _ in range(600) if len(os.listdir('{tmp_path}')) < 3]; "
        "raise RuntimeError('the roof is on fire')"
    )
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of 3 died \(exit code 1\)") as caught:
        launch(python(code), 3)
    assert time.monotonic() - start_s < 30
    assert caught.value.tail.endswith("RuntimeError: the roof is on fire")
    assert not any(is_running(int(file.read_text())) for file in tmp_path.iterdir())


def test_killed_rank_is_named_with_the_signal() -> None:
    code = "rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)"
    with pytest.raises(WorkerError, match=r"rank 1 of 2 died \(killed by SIGKILL\); .* memory"):
        launch(python(code), 2)


def test_rank_that_ignores_the_request_to_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.driver.processes.launch.STOP_GRACE_S", 0.2)
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "rank == 1 and sys.exit(3); time.sleep(60)"
    )
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of 2 died \(exit code 3\)"):
        launch(python(code), 2)
    assert time.monotonic() - start_s < 30


def test_plain_failure_that_a_rank_reports_is_raised_with_its_message_alone() -> None:
    code = REPORTS + "report_failure(ValueError('no such plan'), is_plain=True); sys.exit(1)"
    with pytest.raises(ValueError, match=r"^no such plan$"):
        launch(python(code), 2)


def test_rank_that_failed_first_is_blamed_even_if_another_ended_before_it() -> None:
    code = (
        REPORTS + "rank == 0 and time.sleep(0.5); "
        "report_failure(RuntimeError(f'rank {rank} fell'), is_plain=False); "
        "rank == 1 and time.sleep(60); sys.exit(1)"
    )
    with pytest.raises(WorkerError, match="rank 1 of 2 died") as caught:
        launch(python(code), 2)
    assert caught.value.tail == "RuntimeError: rank 1 fell"


def test_time_limit_stops_all_ranks_and_says_which_were_running() -> None:
    with pytest.raises(WorkerError, match=r"ranks \[1\] of 2 were still running after .* 1 s"):
        launch(python("rank == 1 and time.sleep(60)"), 2, time_limit_s=1)


@contextmanager
def launcher_of_two(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that launches two ranks, both started; each writes its id into the folder."""
    rank_code = (
        f"import os, time; open('{folder}/' + os.environ['RANK'], 'w').write(str(os.getpid())); "
        "time.sleep(60)"
    )
    launcher_code = (
        "import sys; from shardweave.driver.processes.launch import launch; "
        f"launch([sys.executable, '-c', {rank_code!r}], 2)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", launcher_code])
    try:
        deadline_s = time.monotonic() + 60
        while not all(_is_written(folder / str(rank)) for rank in range(2)):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()
        for file in folder.iterdir():
            if is_running(int(file.read_text())):
                os.kill(int(file.read_text()), signal.SIGKILL)


def test_terminated_launcher_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with launcher_of_two(tmp_path) as launcher:
        launcher.terminate()
        assert launcher.wait(30) == 128 + signal.SIGTERM
        assert not any(is_running(int(file.read_text())) for file in tmp_path.iterdir())


@pytest.mark.skipif(not LINUX, reason="only Linux ends the children of what was killed")
def test_killed_launcher_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with launcher_of_two(tmp_path) as launcher:
        launcher.kill()
        assert launcher.wait(30) == -signal.SIGKILL
        deadline_s = time.monotonic() + 20
        while any(is_running(int(file.read_text())) for file in tmp_path.iterdir()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def _is_written(path: Path) -> bool:
    return path.exists() and path.read_text() != ""


def test_more_processes_than_a_machine_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="1,000,000 processes are more than the"):
        launch(["true"], 10**6)
