"""Costs of ops and collectives, against formulas worked out by hand."""

import math
from dataclasses import replace

import pytest

from shardweave.ir.dialects.dist import CollectiveOp, DistOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import is_attention
from shardweave.ir.program.traffic import bytes_moved
from shardweave.passes.pipeline import run_passes
from shardweave.planners.cost.cluster import (
    Cluster,
    ClusterError,
    CollectiveTimes,
    Island,
    MeasuredRing,
    NodeType,
)
from shardweave.planners.cost.model import CostModel, kind_of, signature_text
from shardweave.planners.cost.presets import find_cluster
from shardweave.tests.ir_text import step
from shardweave.tests.planners.small_clusters import DEVICE, cluster, local


def times(text: str, on: Cluster, mesh: str = "tensor=2") -> list[float]:
    """Seconds of each op on the device itself."""
    program = local(text, mesh)
    model = CostModel(on, program.mesh or Mesh())
    return [model.op_time_s(op) for op in program.ops]


def seconds(text: str, on: Cluster, mesh: str) -> float:
    """Seconds of the only collective of a text."""
    program = local(text, mesh)
    model = CostModel(on, program.mesh or Mesh())
    (found,) = [op for op in program.ops if isinstance(op, CollectiveOp)]
    return model.collective_time_s(found)


ALL_REDUCE = """
    input %x : @
    %y = dist.all_reduce(%x, axes = [AXES]) : @
    output %y
"""


def all_reduce_s(on: Cluster, mesh: str, *axes: str) -> float:
    return seconds(ALL_REDUCE.replace("AXES", ", ".join(f'"{a}"' for a in axes)), on, mesh)


def with_device(on: Cluster, **values: object) -> Cluster:
    return replace(on, devices={"unit": replace(DEVICE, **values)})


def test_product_takes_the_longer_of_arithmetic_and_memory() -> None:
    text = "input %x : @\n%y = aten.mm(%x, %x) : @\noutput %y"
    assert times(text, cluster()) == [pytest.approx(2e-3)]
    slow_memory = with_device(cluster(), memory_bandwidth_bytes_s=1e7)
    assert times(text, slow_memory) == [pytest.approx(3 * 40_000 / 1e7)]


def test_efficiency_is_interpolated_on_log_axes() -> None:
    text = "input %x : @\n%y = aten.mm(%x, %x) : @\noutput %y"
    curve = ((2e4, 0.1), (2e8, 1.0))  # 2e6 FLOPs are in the middle: sqrt(0.1)
    assert times(text, with_device(cluster(), efficiency=curve)) == [
        pytest.approx(2e-3 / math.sqrt(0.1))
    ]


@pytest.mark.parametrize(
    ("dtype", "vocab", "aligned_bytes", "slowdown"),
    [
        ("bf16", 50257, 16, 3), ("bf16", 50260, 16, 3), ("bf16", 50264, 16, 1),
        ("bf16", 50257, 4, 3), ("bf16", 50258, 4, 1), ("f32", 50257, 16, 1),
    ],
)  # fmt: skip
def test_product_of_16_bits_whose_rows_are_not_aligned_takes_longer(
    dtype: str, vocab: int, aligned_bytes: int, slowdown: int
) -> None:
    """Forward, and the gradients of its input and of its weight: all read or write such rows."""
    text = f"""
        input %x : tensor<16x8x{dtype}>
        param %w : tensor<{vocab}x8x{dtype}>
        %wt = aten.permute(%w, dims = [1, 0]) : tensor<8x{vocab}x{dtype}>
        %y = aten.mm(%x, %wt) : tensor<16x{vocab}x{dtype}>
        %dx = aten.mm(%y, %w) : tensor<16x8x{dtype}>
        %yt = aten.permute(%y, dims = [1, 0]) : tensor<{vocab}x16x{dtype}>
        %dw = aten.mm(%yt, %x) : tensor<{vocab}x8x{dtype}>
        output %dx
        grad w = %dw
    """
    flops = {"float32": 1e9, "bfloat16": 1e9}
    on = with_device(cluster(), flops=flops, unaligned_slowdown=3.0, aligned_bytes=aligned_bytes)
    each = 2 * 16 * 8 * vocab / 1e9
    assert [s for s in times(text, on) if s] == pytest.approx([slowdown * each] * 3)


def test_product_of_aligned_matrices_is_not_slowed_by_how_many_rows_there_are() -> None:
    text = """
        input %x : tensor<15x8xbf16>
        param %w : tensor<8x16xbf16>
        %y = aten.mm(%x, %w) : tensor<15x16xbf16>
        output %y
    """
    on = with_device(cluster(), flops={"bfloat16": 1e9}, unaligned_slowdown=3.0)
    assert times(text, on) == pytest.approx([2 * 15 * 8 * 16 / 1e9])


def test_dims_that_a_view_merges_are_one_row_of_a_product() -> None:
    """As the gradient of a gate and what it lets through, which lie side by side, is one matrix."""
    text = """
        input %x : tensor<4x8x2xbf16>
        param %w : tensor<16x8xbf16>
        %rows = aten.view(%x) : tensor<4x16xbf16>
        %y = aten.mm(%rows, %w) : tensor<4x8xbf16>
        output %y
    """
    on = with_device(cluster(), flops={"bfloat16": 1e9}, unaligned_slowdown=3.0)
    assert [s for s in times(text, on) if s] == pytest.approx([2 * 4 * 16 * 8 / 1e9])


def test_op_without_arithmetic_takes_its_bytes_and_the_overhead() -> None:
    text = "input %x : @\n%y = aten.add.Tensor(%x, %x) : @\noutput %y"
    on = with_device(cluster(), memory_bandwidth_bytes_s=1e8, overhead_s=1e-5)
    assert times(text, on) == [pytest.approx(3 * 40_000 / 1e8 + 1e-5)]


def test_views_are_free_unless_reshaping_must_copy() -> None:
    text = """
        input %x : tensor<4x6xf32>
        %split = aten.view(%x) : tensor<4x2x3xf32>
        %turned = aten.permute(%split, dims = [1, 0, 2]) : tensor<2x4x3xf32>
        %cut = aten.view(%turned) : tensor<2x2x2x3xf32>
        %merged = aten.view(%turned) : tensor<8x3xf32>
        output %merged
    """
    program = step(text, "tensor=2", local=True)
    assert [kind_of(op) for op in program.ops] == ["view", "view", "view", "compute"]
    assert [bytes_moved(op) for op in program.ops] == [0, 0, 0, 2 * 96]


def test_lookup_reads_only_the_rows_it_returns() -> None:
    text = """
        param %w : tensor<1000x8xf32>
        input %i : tensor<4xi64>
        %y = aten.embedding(%w, %i) : tensor<4x8xf32>
        output %y
    """
    (op,) = step(text).ops
    assert bytes_moved(op) == 2 * 4 * 8 * 4 + 4 * 8


def test_measured_time_of_a_signature_wins_over_curves_and_model() -> None:
    text = "input %x : @\n%y = aten.mm(%x, %x) : @\noutput %y"
    (op,) = local(text).ops
    name = signature_text(op)
    assert name == "aten.mm(float32[100,100], float32[100,100]) -> float32[100,100]"
    curve = with_device(cluster(), op_times={"aten.mm": ((2e6, 0.5),)})
    assert times(text, curve) == [pytest.approx(0.5)]
    both = with_device(cluster(), op_times={"aten.mm": ((2e6, 0.5),)}, measured={name: 0.25})
    assert times(text, both) == [0.25]


def test_default_curve_is_for_ops_by_bytes_only() -> None:
    text = """
        input %x : @
        %y = aten.mm(%x, %x) : @
        %z = aten.relu(%y) : @
        output %z
    """
    on = with_device(cluster(), op_times={"default": ((80_000, 0.5),)})
    assert times(text, on) == [pytest.approx(2e-3), pytest.approx(0.5)]


def test_curve_of_arithmetic_is_scaled_to_other_dtypes_by_their_peaks() -> None:
    text = "input %x : tensor<100x100xf64>\n%y = aten.mm(%x, %x) : tensor<100x100xf64>\noutput %y"
    on = with_device(
        cluster(), flops={"float32": 1e9, "float64": 5e8}, op_times={"aten.mm": ((2e6, 0.5),)}
    )
    assert times(text, on) == [pytest.approx(1.0)]


def test_missing_dtype_is_named_with_what_to_add() -> None:
    text = "input %x : tensor<8x8xbf16>\n%y = aten.mm(%x, %x) : tensor<8x8xbf16>\noutput %y"
    with pytest.raises(
        ValueError, match=r"'unit' has no peak FLOP/s for that dtype .*add 'bfloat16'"
    ):
        times(text, cluster())


def test_mixed_cluster_is_as_fast_as_its_slowest_device_in_use() -> None:
    text = "input %x : @\n%y = aten.mm(%x, %x) : @\noutput %y"
    slow = replace(DEVICE, name="slow", flops={"float32": 1e8})
    nodes = (
        NodeType("unit", 2, 1, 1e8, nic_bandwidth_bytes_s=1e7),
        NodeType("slow", 2, 1, 1e8, nic_bandwidth_bytes_s=1e6),
    )
    mixed = Cluster("mixed", {"unit": DEVICE, "slow": slow}, nodes)
    assert times(text, mixed, "tensor=2") == [pytest.approx(2e-3)]
    assert times(text, mixed, "tensor=4") == [pytest.approx(2e-2)]
    # Between nodes the smaller NIC decides.
    assert all_reduce_s(mixed, "tensor=4", "tensor") == pytest.approx(1.5 * 40_000 / 1e6)


def test_ring_sends_twice_its_share_over_the_slowest_hop_and_pays_every_step() -> None:
    on = cluster(nodes=2, devices=2, network_latency_s=1e-3)
    assert all_reduce_s(on, "tensor=4", "tensor") == pytest.approx(6e-3 + 1.5 * 40_000 / 1e7)
    assert all_reduce_s(on, "data=2,tensor=2", "tensor") == pytest.approx(40_000 / 1e8)


def test_groups_that_cross_a_nic_at_once_share_it() -> None:
    assert all_reduce_s(cluster(2, 2), "data=2,tensor=2", "data") == pytest.approx(2 * 40_000 / 1e7)
    four = cluster(nodes=2, devices=4)
    assert all_reduce_s(four, "data=2,tensor=4", "data") == pytest.approx(4 * 40_000 / 1e7)
    nics = replace(four, nodes=(replace(four.nodes[0], nics=4),))
    assert all_reduce_s(nics, "data=2,tensor=4", "data") == pytest.approx(40_000 / 1e7)


@pytest.mark.parametrize(
    ("call", "result", "sent"),
    [
        ('all_gather(%x, axes = ["tensor"], dim = 0, block = 100)', "200x100", 40_000),
        ('reduce_scatter(%x, axes = ["tensor"], dim = 0, block = 50)', "50x100", 20_000),
        (
            'all_to_all(%x, axes = ["tensor"], dim = 0, block = 50, from_dim = 1, '
            "from_block = 100)",
            "50x200",
            20_000,
        ),
    ],
)
def test_other_collectives_take_what_they_send(call: str, result: str, sent: float) -> None:
    text = f"input %x : @\n%y = dist.{call} : tensor<{result}xf32>\noutput %y"
    assert seconds(text, cluster(), "tensor=2") == pytest.approx(sent / 1e7)


def test_all_to_all_lets_every_rank_of_a_node_use_its_nic() -> None:
    sizes = "dim = 0, block = 25, from_dim = 1, from_block = 100"
    text = f"""
        input %x : @
        %y = dist.all_to_all(%x, axes = ["tensor"], {sizes}) : tensor<25x400xf32>
        output %y
    """
    assert seconds(text, cluster(2, 2), "tensor=4") == pytest.approx(0.75 * 40_000 / (1e7 / 2))


def test_island_joins_neighbours_by_a_faster_link() -> None:
    plain = cluster(nodes=1, devices=4)
    pairs = replace(plain, nodes=(replace(plain.nodes[0], islands=(Island(2, 1e9),)),))
    assert all_reduce_s(pairs, "data=2,tensor=2", "tensor") == pytest.approx(40_000 / 1e9)
    assert all_reduce_s(pairs, "data=2,tensor=2", "data") == pytest.approx(40_000 / 1e8)


def test_measured_ring_wins_over_links_for_its_stride_and_size() -> None:
    plain = cluster(nodes=1, devices=4)
    rings = (MeasuredRing(stride=2, ranks=2, bandwidth_bytes_s=5e7),)
    measured = replace(plain, nodes=(replace(plain.nodes[0], rings=rings),))
    assert all_reduce_s(measured, "data=2,tensor=2", "data") == pytest.approx(40_000 / 5e7)
    assert all_reduce_s(measured, "data=2,tensor=2", "tensor") == pytest.approx(40_000 / 1e8)


def test_measured_collective_is_interpolated_and_grows_beyond_its_end() -> None:
    table = CollectiveTimes("all_reduce", 2, 2, ((10_000.0, 1.0), (20_000.0, 2.0)))
    assert all_reduce_s(cluster(collectives=(table,)), "tensor=2", "tensor") == pytest.approx(4.0)
    # On two nodes of two, two groups share the NIC.
    shared = cluster(2, 2, collectives=(table,))
    assert all_reduce_s(shared, "data=2,tensor=2", "data") == pytest.approx(8.0)


def test_collective_over_axes_of_size_one_is_free() -> None:
    text = 'input %x : @\n%y = dist.all_reduce(%x, axes = ["data"]) : @\noutput %y'
    on = cluster(start_overhead_s=1.0)
    assert seconds(text, on, "data=1,tensor=2") == 0.0
    assert times(text, on, "data=1,tensor=2") == [0.0]


def test_starting_a_collective_costs_the_device_a_constant_and_a_copy() -> None:
    text = 'input %x : @\n%y = dist.all_reduce(%x, axes = ["tensor"]) : @\noutput %y'
    on = cluster(start_overhead_s=1e-3, start_bandwidth_bytes_s=1e8)
    assert times(text, on) == [pytest.approx(1e-3 + 40_000 / 1e8)]


def test_stream_and_links_follow_from_the_axes() -> None:
    program = local(ALL_REDUCE.replace("AXES", '"tensor", "data"'), "data=2,tensor=2")
    (op,) = program.ops
    assert isinstance(op, DistOp)
    model = CostModel(cluster(2, 2), program.mesh or Mesh())
    assert model.stream_of(op) == ("data", "tensor")
    assert model.ring(op).links == ("network", "node")


def test_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="has 4 devices, but cluster 'unit' has only 2"):
        CostModel(cluster(), Mesh(tensor=4))


FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


def attention_s(cut: str, on: Cluster, causal: str = "true") -> float:
    """Seconds of an attention of eight positions whose queries are cut so on `context=4`."""
    type_ = "tensor<1x1x8x64xf32>"
    arguments = [f"input %{name} : {type_} [{{}}, {{}}, {cut}, {{}}]" for name in "qkv"]
    op = f"%o, %l = {FLASH}(%q, %k, %v, is_causal = {causal}) : {type_}, tensor<1x1x8xf32>"
    text = "\n".join([*arguments, op, f"output %o [{{}}, {{}}, {cut}, {{}}]"])
    program = run_passes(step(text, "context=4"), "propagate-shardings,insert-collectives,cse,dce")
    model = CostModel(on, program.needed_mesh())
    (found,) = [op for op in program.ops if is_attention(op)]
    return model.op_time_s(found)


@pytest.mark.parametrize(
    "values",
    [{}, {"attention_efficiency": ((1.0, 0.5),)}, {"op_times": {FLASH: ((1.0, 1e-6), (1e9, 1e3))}}],
)
def test_causal_attention_takes_what_the_device_computes_that_sees_most(
    values: dict[str, object],
) -> None:
    on = with_device(cluster(nodes=4), memory_bandwidth_bytes_s=1e18, **values)
    stripes, plain = (attention_s(cut, on) for cut in ('{"context":1}', '{"context"}'))
    # Of 8 keys queries 3 and 7 see 4 and 8, queries 6 and 7 see 7 and 8.
    assert plain / stripes == pytest.approx((7 + 8) / (4 + 8))
    if "attention_efficiency" in values:
        # Of equal types, the one without a mask computes all.
        assert attention_s("{}", on, "false") == pytest.approx(2 * attention_s("{}", on))


def test_attention_on_the_pod_takes_what_flash_attention_2_does() -> None:
    """Llama-3-405B's, cut by tensor=8 and context=16: 16 heads, 8,192 queries of 131,072 keys."""
    rows, keys = "tensor<1x16x8192x128xbf16>", "tensor<1x1x131072x128xbf16>"
    text = f"""
        input %q : {rows}
        input %k : {keys}
        %o, %l = {FLASH}(%q, %k, %k) : {rows}, tensor<1x16x8192xf32>
        output %o
    """
    program = step(text, "tensor=8", local=True)
    (op,) = program.ops
    flops = 4 * 16 * 8192 * 131_072 * 128
    seconds = CostModel(find_cluster("h100-pod"), program.needed_mesh()).op_time_s(op)
    assert seconds == pytest.approx(flops / (0.35 * 989e12), rel=1e-3)


def test_merging_the_pieces_of_attention_takes_what_it_moves() -> None:
    on = with_device(cluster(nodes=4), memory_bandwidth_bytes_s=1e3, flops={"float32": 1e30})
    # Of eight keys in stripes of four: a triangle for each residue. Two queries of 64 float32,
    # whose parts are written, scaled and added to a scaled total: 4 pieces of 32 bytes, and 12.
    merged = 2 * 64 * (4 * 32 + 12)
    read = 4 * (2 * 64 + 8 * 64 + 8 * 64 + 2 * 64 + 2) + 8 * (2 + 8)
    assert attention_s('{"context":1}', on) == pytest.approx((merged + read) / 1e3)


def test_attention_with_a_mask_is_not_taken_for_one_without() -> None:
    type_ = "tensor<1x1x8x64xf32>"
    lines = [
        f"%{n}, %{n}l = {FLASH}(%x, %x, %x{more}) : {type_}, tensor<1x1x8xf32>"
        for n, more in (("a", ""), ("b", ", is_causal = true"))
    ]
    text = "\n".join([f"input %x : {type_}", *lines, "output %a", "output %b"])
    on = with_device(cluster(), memory_bandwidth_bytes_s=1e15, attention_efficiency=((1.0, 1.0),))
    program = step(text, "tensor=2", local=True)
    model = CostModel(on, program.needed_mesh())
    whole, causal = (model.op_time_s(op) for op in program.ops)
    assert causal == pytest.approx(whole / 2)
