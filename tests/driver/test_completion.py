"""What a shell offers while a command is typed, asked of a real shell."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from shardweave.driver.cli import main
from shardweave.passes.presets import PREFIX, PRESETS

Captured = pytest.CaptureFixture[str]

ASK = {
    "bash": 'line={line}; COMP_LINE="$line" COMP_POINT=${{#line}}; _shardweave; echo "${{COMPREPLY[@]}}"',
    "fish": "complete -C {line} | string replace -r '\\s.*' '' | string join ' '; true",
}


def offered(shell: str, script: str, line: str) -> list[str]:
    """What the shell offers for a line that is typed so far."""
    ask = ASK[shell].format(line=shlex.quote(line))
    done = subprocess.run(
        [shell, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ASK)
def test_shell_offers_commands_options_and_their_values(shell: str, capsys: Captured) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} found; on Debian: apt install {shell}")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert offered(shell, script, "shardweave ex") == ["explore"]
    assert offered(shell, script, "shardweave opt --pass") == ["--passes"]
    assert offered(shell, script, "shardweave plan f --planner o") == ["oases", "oppa"]
    last = offered(shell, script, "shardweave opt f --passes cse,preset:oa")
    # bash replaces what follows the colon alone.
    assert last == [{"bash": "oases", "fish": "cse,preset:oases"}[shell]]


def test_help_lists_every_command_under_its_task(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "look at it:\n  explore     Show what each pass does, as an HTML page.\n" in said


@pytest.mark.parametrize("command", ["opt", "explore"])
def test_help_lists_the_presets(command: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in PRESETS if f"\n  {PREFIX}{name} " not in said] == []
