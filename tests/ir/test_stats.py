"""stats: ops, FLOPs, parameters and messages of small programs, counted by hand."""

from __future__ import annotations

from shardweave.ir.program.program_stats import CollectiveStats
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, captured, megatron, partitioned

TEXT = """
    param %w : tensor<8x16xf32> [{}, {"tensor"}]
    param %b : tensor<16xbf16>
    input %x : tensor<4x8xf32>
    %h = aten.mm(%x, %w) {phase = forward} : tensor<4x16xf32>
    %s = dist.all_reduce(%h, axes = ["tensor"]) {phase = forward} : tensor<4x16xf32>
    %g = dist.all_gather(%s, axes = ["data"], dim = 0, block = 4) {phase = forward} : tensor<8x16xf32>
    %m, %n = dist.all_reduce(%s, %h, axes = ["tensor"]) {phase = forward} : tensor<4x16xf32>, tensor<4x16xf32>
    %c = dist.slice(%m, axes = ["data"], dim = 0, block = 2) {phase = backward} : tensor<2x16xf32>
    %d = dist.reduce_scatter(%n, axes = ["data"], dim = 1, block = 8) {phase = backward} : tensor<4x8xf32>
    output %g
    output %c
    output %d
"""


def test_ops_and_flops_are_counted_by_phase() -> None:
    stats = step(TEXT, "data=2,tensor=4", local=True).stats()
    assert stats.ops == {"forward": 4, "backward": 2}
    assert stats.flops == {"forward": 2 * 4 * 8 * 16, "backward": 0}
    assert stats.parameter_bytes == 8 * 16 * 4 + 16 * 2


def test_messages_are_counted_by_kind_axes_and_phase_with_their_bytes() -> None:
    stats = step(TEXT, "data=2,tensor=4", local=True).stats()
    value = 4 * 16 * 4
    assert stats.collectives == (
        CollectiveStats("all_reduce", ("tensor",), "forward", 2, 3 * value, 3 * value * 2 * 3 / 4),
        CollectiveStats("all_gather", ("data",), "forward", 1, value, value),
        CollectiveStats("reduce_scatter", ("data",), "backward", 1, value, value / 2),
    )


def test_count_selects_by_kind_and_axes() -> None:
    stats = step(TEXT, "data=2,tensor=4", local=True).stats()
    assert stats.count() == 4
    assert stats.count("all_reduce") == 2
    assert stats.count(axes=("data",)) == 2
    assert stats.count("all_reduce", ("data",)) == 0


def test_text_of_stats_has_a_line_for_each_sort_of_message() -> None:
    lines = str(step(TEXT, "data=2,tensor=4", local=True).stats()).splitlines()
    assert lines[0] == "ops: 4 forward, 2 backward"
    assert lines[-3:] == [
        "all_reduce over tensor (forward): 2, 0.001 MiB",
        "all_gather over data (forward): 1, 0.000 MiB",
        "reduce_scatter over data (backward): 1, 0.000 MiB",
    ]


def test_backward_has_twice_the_flops_of_forward() -> None:
    stats = captured("cnn:depth=10,channels=8,size=8,batch=8,pool=true").program.stats()
    # The first convolution needs no gradient of its input, so a little less.
    assert 1.8 < stats.flops["backward"] / stats.flops["forward"] < 2


def test_each_of_four_devices_does_a_quarter_of_the_matrix_products() -> None:
    spec, mesh = SPECS["gpt"], "data=2,tensor=2"
    whole = captured(spec).program.stats()
    local = partitioned(spec, mesh, megatron(spec, mesh)).stats()
    for phase in ("forward", "backward"):
        assert local.flops[phase] * 4 == whole.flops[phase]
