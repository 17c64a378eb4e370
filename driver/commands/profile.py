"""The `profile` command: this machine as a cluster file."""

from __future__ import annotations

import argparse
import time

from shardweave.driver.profile import profile_machine
from shardweave.planners.cost.cluster_file import save_cluster


def profile_command(options: argparse.Namespace) -> int:
    """Measure, write the cluster, and say what it holds."""
    start_s = time.monotonic()
    cluster = profile_machine(
        options.nproc,
        options.programs,
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
