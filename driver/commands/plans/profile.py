"""The `profile` command: this machine as a cluster file."""

from __future__ import annotations

import argparse
import time

from shardweave.driver.commands.arguments import Commands, count, new_command


def add_parser(commands: Commands) -> None:
    command = new_command(commands, profile_command)
    command.add_argument(
        "programs",
        metavar="PROGRAM",
        nargs="*",
        help="measure the ops of these programs or models at their shapes; a global program is "
        "first sharded in every way that a plan for the processes could, sequences too",
    )
    command.add_output("default: cluster.yaml", default="cluster.yaml")
    command.add_argument(
        "--nproc",
        type=count("a number of processes, such as 2", least=1),
        default=2,
        metavar="N",
        help="processes, all busy (default: 2)",
    )
    command.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="command that starts rank {rank}, such as "
        "'ip netns exec sw{rank} env GLOO_SOCKET_IFNAME=eth0'",
    )
    command.add_argument(
        "--per-node",
        type=count("a number of processes, such as 2", least=1),
        metavar="N",
        help="processes that make a node (default: 1 with --launcher, else all)",
    )
    command.add_argument(
        "--name", default="profiled", help="name of the cluster (default: profiled)"
    )
    command.add_time_limit("stop")


def profile_command(options: argparse.Namespace) -> int:
    """Measure this machine's CPU into a cluster file."""
    from shardweave.driver.commands.read_programs import read_or_capture
    from shardweave.driver.profile.profile import profile_machine
    from shardweave.planners.cost.cluster_file import save_cluster

    programs = [read_or_capture(name) for name in options.programs]
    start_s = time.monotonic()
    cluster = profile_machine(
        options.nproc,
        programs,
        launcher=options.launcher,
        per_node=options.per_node,
        name=options.name,
        time_limit_s=options.time_limit,
    )
    save_cluster(cluster, options.output)
    (device,) = cluster.devices.values()
    gflops, gbytes = device.flops["float32"] / 1e9, device.memory_bandwidth_bytes_s / 1e9
    print(
        f"each of {cluster.num_devices} processes, all busy: {gflops:.1f} GFLOP/s in float32, "
        f"{gbytes:.1f} GB/s of memory"
    )
    bandwidth = max(
        max(node.bandwidth_bytes_s, node.network_bandwidth_bytes_s) for node in cluster.nodes
    )
    if bandwidth:
        print(
            f"between them: {bandwidth / 1e6:.1f} MB/s each way; beside communication compute "
            f"takes {cluster.overlap_slowdown:.2f} times as long, and communication beside "
            f"compute {cluster.link_slowdown:.2f} times"
        )
    print(f"wrote {options.output} in {time.monotonic() - start_s:.0f} s")
    return 0
