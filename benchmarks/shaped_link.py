"""A small cluster on one machine: network namespaces on a bridge, every NIC shaped to a rate.

Needs root (CAP_NET_ADMIN) and the `ip` and `tc` tools (Debian: iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

BRIDGE = "swbr"
_SETTINGS = (
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_no_metrics_save=1",
)


MTU = 9000
"""Of every NIC, in bytes."""


def _why_not() -> str | None:
    """Why a shaped link cannot be made here; None if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"the tool {missing[0]} is missing (install iproute2)" if missing else None


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)


@contextmanager
def shaped_link(num_nodes: int, rate: str) -> Iterator[None]:
    """Nodes 0 .. n-1, each with a full-duplex NIC of `rate` (as tc writes it: 250mbit).

    With an empty rate there are none. Where there can be none, says so and ends the process.
    """
    if not rate:
        yield
        return
    if reason := _why_not():
        print(f"skipped: the link cannot be shaped here: {reason}.")
        raise SystemExit
    _take_down(num_nodes)
    try:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "mtu", str(MTU), check=False)
        _run("ip", "link", "set", BRIDGE, "up")
        for node in range(num_nodes):
            _add_node(node, rate)
        yield
    finally:
        _take_down(num_nodes)


def _add_node(node: int, rate: str) -> None:
    space, host = f"sw{node}", f"swh{node}"
    shape = ("root", "tbf", "rate", rate, "burst", "128kb", "limit", "16mb")
    _run("ip", "netns", "add", space)
    _run("ip", "link", "add", host, "mtu", str(MTU), "type", "veth",
         "peer", "name", "eth0", "netns", space)  # fmt: skip
    _run("ip", "link", "set", host, "master", BRIDGE, "up")
    _run("ip", "-n", space, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
    _run("ip", "-n", space, "link", "set", "eth0", "mtu", str(MTU), "up")
    _run("ip", "-n", space, "link", "set", "lo", "up")
    _run("ip", "netns", "exec", space, "sysctl", "-qw", *_SETTINGS, check=False)
    _run("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", "eth0", *shape)
    _run("tc", "qdisc", "replace", "dev", host, *shape)


def _take_down(num_nodes: int) -> None:
    for node in range(num_nodes):
        _run("ip", "netns", "del", f"sw{node}", check=False)
        _run("ip", "link", "del", f"swh{node}", check=False)
    _run("ip", "link", "del", BRIDGE, check=False)


def launcher() -> str:
    """The shell command that starts rank `{rank}` on the node of its number."""
    prefix, variables = on_node("{rank}")
    return " ".join([*prefix, "env", *(f"{key}={value}" for key, value in variables.items())])


def on_node(node: int | str) -> tuple[list[str], dict[str, str]]:
    """Command prefix and environment of a process that runs on a node."""
    prefix = ["ip", "netns", "exec", f"sw{node}"]
    return prefix, {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.77.0.1"}
