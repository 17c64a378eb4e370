"""Cluster descriptions: where ranks stand, presets, and YAML with its errors."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardweave.planners.cost.cluster import Cluster, ClusterError, NodeType
from shardweave.planners.cost.cluster_file import (
    cluster_text,
    load_cluster,
    parse_cluster,
    save_cluster,
)
from shardweave.planners.cost.presets import find_cluster, preset_names
from shardweave.planners.cost.quantity import counted, quantity, seconds_text
from shardweave.tests.planners.small_clusters import DEVICE

GOOD = """
name: small
devices:
  fast: {flops: {float32: 10T}, memory_bytes: 16GiB, memory_bandwidth_bytes_s: 900GB/s}
nodes:
  - {device: fast, devices: 4, count: 2, bandwidth_bytes_s: 12e9, nic_bandwidth_bytes_s: 100Gbit/s}
"""


def test_ranks_fill_one_node_after_another() -> None:
    nodes = (NodeType("unit", 4, 2, 1.0), NodeType("unit", 2, 1, 1.0))
    mixed = Cluster("mixed", {"unit": DEVICE}, nodes)
    assert (mixed.num_nodes, mixed.num_devices) == (3, 10)
    assert [mixed.place(rank) for rank in (0, 3, 4, 8, 9)] == [
        (0, 0),
        (0, 3),
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    with pytest.raises(ClusterError, match="has 10 devices and no rank 10"):
        mixed.place(10)


def test_device_types_are_those_of_the_ranks_in_use() -> None:
    slow = replace(DEVICE, name="slow")
    nodes = (NodeType("unit", 2, 1, 1.0), NodeType("slow", 2, 1, 1.0))
    mixed = Cluster("mixed", {"unit": DEVICE, "slow": slow}, nodes)
    assert [d.name for d in mixed.device_types(2)] == ["unit"]
    assert [d.name for d in mixed.device_types(3)] == ["unit", "slow"]


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_and_survives_being_written(name: str, tmp_path: Path) -> None:
    found = find_cluster(name)
    assert found.name == name
    assert "float32" in next(iter(found.devices.values())).flops
    save_cluster(found, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == found


def test_presets_are_those_of_the_papers_and_the_testbed() -> None:
    sizes = {name: find_cluster(name).num_devices for name in preset_names()}
    assert sizes == {
        "amp-het-cluster": 16,
        "amp-het-model": 16,
        "amp-homogeneous": 16,
        "aws-a10g": 32,
        "aws-t4": 16,
        "clariden": 256,
        "dgx-a100": 64,
        "dgx-a100-40": 64,
        "dgx-b200": 64,
        "dgx-h100": 64,
        "dgx-h200": 64,
        "dgx-v100": 32,
        "dgx-v100-32": 32,
        "frontier": 1024,
        "gcp-l4": 32,
        "grand-teton": 64,
        "h100-pod": 64,
        "hgx-a800": 64,
        "hgx-h800": 64,
        "mi300x": 64,
        "oases-3090": 32,
        "oases-nvlink-3090": 32,
        "perlmutter": 256,
        "rtx-2080": 4,
        "rtx-3090": 4,
        "rtx-a5000": 8,
        "testbed": 2,
        "titan-rtx": 4,
        "tpu-v5p": 64,
    }


def test_preset_takes_a_rate_and_a_number_of_nodes() -> None:
    assert find_cluster("testbed:rate=190mbit").nodes[0].nic_bandwidth_bytes_s == 190e6 / 8
    assert find_cluster("perlmutter:nodes=256").num_devices == 1024
    with pytest.raises(ClusterError, match="option 'rate=fast' is unknown; use rate=RATE"):
        find_cluster("testbed:rate=fast")
    with pytest.raises(
        ClusterError, match="rate=250 has no unit; write rate=250mbit, or rate=250B"
    ):
        find_cluster("testbed:rate=250")


def test_presets_that_are_joined_are_one_cluster_as_slow_as_the_slowest() -> None:
    mixed = find_cluster("dgx-a100:nodes=2+dgx-v100:nodes=1")
    assert mixed.num_devices == 24
    assert [device.name for device in mixed.device_types(24)] == ["A100-80GB", "V100-16GB"]
    assert mixed.start_overhead_s == find_cluster("dgx-a100").start_overhead_s
    assert not mixed.collectives
    with pytest.raises(
        ClusterError, match="cluster 'dgx-x100' is neither a preset nor a file; did"
    ):
        find_cluster("dgx-a100+dgx-x100")


def test_unknown_cluster_is_told_how_to_write_one() -> None:
    with pytest.raises(
        ClusterError, match=r"write a cluster file, from the example in docs/clusters\.md"
    ):
        find_cluster("my-own-machine")


def test_seconds_are_told_in_a_unit_that_shows_them() -> None:
    seconds = (0.0, 3.25e-9, 9.9e-6, 1.234e-5, 1.5e-4, 0.0123, 1.5)
    told = [seconds_text(one) for one in seconds]
    assert told == ["0.00 ms", "0.00325 us", "9.9 us", "12.3 us", "0.15 ms", "12.30 ms", "1.500 s"]


def test_unknown_cluster_is_answered_with_the_nearest_preset() -> None:
    with pytest.raises(ClusterError, match="did you mean 'perlmutter'"):
        find_cluster("perlmuter")


def test_options_of_a_file_are_refused_for_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(GOOD)
    with pytest.raises(ClusterError, match=r"only presets take options, and '.*small\.yaml' is a"):
        find_cluster(f"{file}:nodes=2")


def test_file_with_units_reads_as_numbers(tmp_path: Path) -> None:
    found = parse_cluster(GOOD)
    assert found.devices["fast"].flops == {"float32": 10e12}
    assert found.devices["fast"].memory_bytes == 16 * 2**30
    assert found.nodes[0].nic_bandwidth_bytes_s == 12.5e9
    (tmp_path / "small.yaml").write_text(GOOD)
    assert (
        find_cluster(str(tmp_path / "small.yaml")) == find_cluster(tmp_path / "small.yaml") == found
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes: 16GiB, ", "", r"devices\.fast: field 'memory_bytes' is missing; write"),
        ("devices: 4, ", "", r"<c>: nodes\[0\]: field 'devices' is missing"),
        ("name: small", "", "<c>: field 'name' is missing; write a word"),
        ("count: 2", "cuont: 2", r"<c>: nodes\[0\]: the field 'cuont' is unknown; did you mean 'count'"),
        ("count: 2", "count: many", r"nodes\[0\]\.count: found 'many'; write the number of such nodes"),
        ("count: 2", "count: 0", r"nodes\[0\]\.count: found 0; write"),
        ("16GiB", "-1", r"devices\.fast\.memory_bytes: found -1; write the memory of one device"),
        ("900GB/s", "fast", r"memory_bandwidth_bytes_s: found 'fast'; write the bandwidth of one device's"),
        ("10T", "ten", r"devices\.fast\.flops\.float32: found 'ten'; write a number"),
        ("device: fast", "device: slow", "there is no device type 'slow'; use one of fast"),
        (", nic_bandwidth_bytes_s: 100Gbit/s", "", "'nic_bandwidth_bytes_s' is missing; write"),
        ("bandwidth_bytes_s: 12e9, ", "", r"field 'bandwidth_bytes_s' is missing"),
        ("name: small", "name: small\nspeed: 3", "<c>: the field 'speed' is unknown; the fields are name"),
        ("name: small", "name: [", r"<c>:\d+:\d+: not YAML"),
        ("name: small", "name: small\nname: big", r"<c>:3:1: not YAML: 'name' is given twice"),
        ("float32: 10T", "bf16: 10T", r"devices\.fast\.flops: there is no dtype 'bf16'; did you "),
        ("{float32: 10T}", "{}", r"devices\.fast\.flops: a peak FLOP/s above 0 is needed; write peak"),
        ("{float32: 10T}", "{float32: 0T}", r"devices\.fast\.flops: a peak FLOP/s above 0 is needed"),
        ("devices: 4", "devices: 0", r"nodes\[0\]\.devices: found 0; write .* such as 8"),
        ("nodes:\n", "collectives: [{kind: allreduce, ranks: 2, nodes: 1, points: [[1, 2]]}]\nnodes:\n",
         r"collectives\[0\]\.kind: found 'allreduce'; did you mean 'all_reduce'"),
        ("nodes:\n", "overlap_slowdown: 0.9\nnodes:\n",
         "<c>: overlap_slowdown: found 0.9, expected 1 or more; write the factor on compute time"),
        ("nodes:\n", "link_slowdown: 0\nnodes:\n", "link_slowdown: found 0, expected 1 or more"),
        ("nodes:\n", "node_overlap_slowdown: 0.5\nnodes:\n", "found 0.5, expected 1 or more"),
        ("memory_bytes", "unaligned_slowdown: 0.3, memory_bytes", "found 0.3, expected 1 or more"),
        ("memory_bytes", "efficiency: [[1, 0.5], [2, 80]], memory_bytes",
         r"devices\.fast\.efficiency: a point has efficiency 80, expected a fraction of the peak"),
        ("memory_bytes", "attention_efficiency: [[1, 0], [2, 0.5]], memory_bytes",
         "attention_efficiency: a point has efficiency 0, expected a fraction of the peak"),
        ("count: 2", "count: 2, rings: [{stride: 1, ranks: 2, bandwidth_bytes_s: 0}]",
         r"nodes\[0\]\.rings\[0\]\.bandwidth_bytes_s: found 0; write the bandwidth between devices .* or leave"),
        ("count: 2", "count: 2, islands: [{devices: 2, bandwidth_bytes_s: 0}]",
         r"nodes\[0\]\.islands\[0\]\.bandwidth_bytes_s: found 0; write the bandwidth"),
        ("name: small", "name: small\nformat: shardweave.cluster/2",
         "<c>: 'format' must be shardweave.cluster/1, or left out"),
        ("nodes:\n", "nodes: []\nx:\n", r"<c>: the field 'x' is unknown"),
    ],
)  # fmt: skip
def test_wrong_file_says_in_one_line_what_to_write(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ClusterError, match=message) as caught:
        parse_cluster(GOOD.replace(old, new, 1), "<c>")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("curve", ["[]", "3", "[[1, 2, 3]]", "[[2, 0.1], [1, 0.2]]", "[[0, 1]]"])
def test_curve_that_does_not_grow_is_refused(curve: str) -> None:
    text = GOOD.replace("memory_bytes", f"efficiency: {curve}, memory_bytes")
    with pytest.raises(ClusterError, match=r"efficiency: found .*; write pairs \[x, y\]"):
        parse_cluster(text)


@pytest.mark.parametrize("text", ["", "3", "[1]"])
def test_file_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="expected fields with values"):
        parse_cluster(text)


def test_text_leaves_out_what_has_its_default() -> None:
    text = cluster_text(parse_cluster(GOOD))
    assert "overlap_slowdown" not in text
    assert parse_cluster(text) == parse_cluster(GOOD)


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("250mbit", "bytes", 31.25e6),
        ("100 Gbit/s", "bytes", 12.5e9),
        ("24GiB", "bytes", 24 * 2**30),
        ("1.5e9", "bytes", 1.5e9),
        ("35.6T", "", 35.6e12),
        ("1GFLOP/s", "", 1e9),
        ("5us", "s", 5e-6),
        (3, "s", 3.0),
        ("5 parsecs", "s", None),
        ("GB", "bytes", None),
        (True, "", None),
    ],
)
def test_quantity_reads_numbers_with_units(text: object, unit: str, number: float | None) -> None:
    assert quantity(text, unit) == (None if number is None else pytest.approx(number))


def test_counts_are_said_of_one_and_of_several() -> None:
    assert counted(1, "point of the space", "was") == "1 point of the space was"
    assert counted(2, "point of the space", "was") == "2 points of the space were"
    assert counted(1, "point", "needs") == "1 point needs"
    assert counted(0, "point", "needs") == "0 points need"
    assert counted(3, "device") == "3 devices"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "brackets are nested too deeply"),
        ("a: 2020-13-45", "not YAML: month must be in 1..12"),
        ("a: \x01", "not YAML: unacceptable character"),
    ],
)
def test_text_that_yaml_cannot_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (2**63, "have .* devices in all, expected at most 1048576"),
        (0.5, r"nodes\[0\].count: found 0.5; write a whole number"),
        (".inf", r"nodes\[0\].count: found inf; write the number"),
        (".nan", r"nodes\[0\].count: found nan; write the number"),
        (10**400, r"nodes\[0\].count: found 1000.*; write the number"),
    ],
)
def test_number_of_nodes_that_none_has_is_refused(count: object, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(GOOD.replace("count: 2", f"count: {count}"))


@pytest.mark.parametrize("count", ["99999999999", "0.5", "1.5", "1e400", "131073"])
def test_number_of_nodes_is_whole_and_has_a_limit(count: str) -> None:
    with pytest.raises(ClusterError, match=r"must be a whole number of 1 or more|use rate=RATE"):
        find_cluster(f"h100-pod:nodes={count}")
