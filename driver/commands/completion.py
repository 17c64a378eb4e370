"""The `completion` command: a script by which a shell completes what is typed."""

from __future__ import annotations

import argparse

from shardweave.driver.commands.arguments import Commands, new_command


def add_parser(commands: Commands) -> None:
    command = new_command(commands, completion_command)
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that you use")
    command.epilog = (
        "to set it up, add a line to what the shell reads when it starts:\n"
        '  bash  ~/.bashrc                   eval "$(shardweave completion bash)"\n'
        '  zsh   ~/.zshrc                    eval "$(shardweave completion zsh)"\n'
        "  fish  ~/.config/fish/config.fish  shardweave completion fish | source"
    )


def completion_command(options: argparse.Namespace) -> int:
    """Print a script that completes commands in a shell."""
    from shardweave.driver.completion import script_for

    print(script_for(options.shell, options.parser), end="")
    return 0
