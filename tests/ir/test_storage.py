"""Which values share memory, what a reshape copies, and what the forward pass keeps."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardweave.ir.dialects.kernel import fuse
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.ops.strides import expected_strides, reshaped
from shardweave.ir.program.blocks import split_at_backward
from shardweave.ir.program.storage import (
    copies,
    is_unshared,
    is_view,
    kept_bytes,
    kept_values,
    makes_memory,
    reduces_in_place,
    storage_of,
)
from shardweave.ir.program.traffic import accesses, bytes_moved, traffic
from shardweave.planners.cost.memory import memory_over_time
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, captured


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor of any strides and a shape of as many elements."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    tensor = torch.empty(shape).permute(draw(st.permutations(range(len(shape)))))
    dim = draw(st.integers(0, len(shape) - 1))
    tensor = draw(
        st.sampled_from([tensor, tensor.narrow(dim, 0, 1), tensor[None].expand(2, *tensor.shape)])
    )
    left, sizes = tensor.numel(), list[int]()
    while left > 1:
        size = draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0]))
        sizes.append(size)
        left //= size
        sizes += [1] * draw(st.integers(0, 1))
    return tensor, tuple(sizes)


@given(reshapes())
def test_strides_of_a_reshape_are_those_of_torch(
    case: tuple[torch.Tensor, tuple[int, ...]],
) -> None:
    tensor, shape = case
    strides = reshaped(tuple(tensor.shape), tuple(tensor.stride()), shape)
    try:
        expected = tensor.view(shape)
    except RuntimeError:
        assert strides is None
        return
    assert strides is not None
    assert torch.empty_strided(shape, strides).shape == expected.shape
    long = [dim for dim, size in enumerate(shape) if size > 1]
    assert [strides[dim] for dim in long] == [expected.stride()[dim] for dim in long]


VIEWS = """
    input %x : tensor<4x6xf32>
    %split = aten.view(%x) : tensor<4x2x3xf32>
    %turned = aten.permute(%split, dims = [1, 0, 2]) : tensor<2x4x3xf32>
    %merged = aten.view(%turned) : tensor<8x3xf32>
    %part = aten.slice.Tensor(%merged, dim = 0, start = 2) : tensor<4x3xf32>
    %one = aten.select.int(%part, dim = 1, index = 1) : tensor<4xf32>
    output %one
"""


def test_values_share_memory_up_to_a_reshape_that_copies() -> None:
    program = step(VIEWS)
    ops = {op.results[0].name_hint: op for op in program.ops}
    shared = {name: storage_of(op.results[0]).name_hint for name, op in ops.items()}
    assert shared == {
        "split": "x", "turned": "x", "merged": "merged", "part": "merged", "one": "merged",
    }  # fmt: skip
    assert [name for name, op in ops.items() if not is_view(op)] == ["merged"]
    assert {name: bytes_moved(op) for name, op in ops.items() if bytes_moved(op)} == {
        "merged": 2 * 4 * 24
    }
    x = torch.arange(24.0).view(4, 6)
    merged = x.view(4, 2, 3).permute(1, 0, 2).reshape(8, 3)
    assert expected_strides(ops["one"].results[0]) == merged[2:6].select(1, 1).stride()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_attention_lies_in_memory_as_its_queries_do(order: tuple[int, int, int]) -> None:
    """Whichever way samples, heads and positions stand there; so merging heads may copy or not."""
    sizes, dims = (2, 3, 4), [*(order.index(dim) for dim in range(3)), 3]
    stored = (*(sizes[dim] for dim in order), 8)
    text = f"""
        input %x : tensor<{"x".join(map(str, stored))}xf32>
        %q = aten.permute(%x, dims = {dims}) : tensor<2x3x4x8xf32>
        %o, %l = aten._scaled_dot_product_flash_attention_for_cpu(%q, %q, %q) : tensor<2x3x4x8xf32>, tensor<2x4x3xf32>
        %turned = aten.permute(%o, dims = [0, 2, 1, 3]) : tensor<2x4x3x8xf32>
        %merged = aten.view(%turned) : tensor<2x4x24xf32>
        %first = aten.permute(%o, dims = [2, 0, 1, 3]) : tensor<4x2x3x8xf32>
        %rows = aten.view(%first) : tensor<8x24xf32>
        output %merged
        output %rows
    """
    _, attention, _, merged, _, rows = step(text).ops
    q = torch.randn(stored).permute(dims)
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert expected_strides(attention.results[0]) == out.stride()
    assert is_view(merged) == shares_memory(out.transpose(1, 2), 2, 4, 24)
    assert is_view(rows) == shares_memory(out.permute(2, 0, 1, 3), 8, 24)


def shares_memory(x: Tensor, *shape: int) -> bool:
    return x.reshape(shape).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", ["gpt", "bert", "cnn"])
def test_kept_bytes_are_what_memory_holds_when_the_backward_pass_begins(name: str) -> None:
    program = captured(SPECS[name]).program
    forward, later = split_at_backward(program)
    kept = kept_values(program)
    results = {storage_of(slot.value) for slot in program.results} - set(kept)
    returned = [value for value in results if value.owner in set(forward)]
    held = memory_over_time(program)[len(forward) + 1]
    made = sum(num_bytes(tensor_type_of(v)) for v in later[0].results)
    assert kept
    assert held["activations"] + held["gradients"] - made == kept_bytes(program) + sum(
        num_bytes(tensor_type_of(value)) for value in returned
    )


@pytest.mark.parametrize(
    ("makes", "is_in_place"),
    [
        ("%a = aten.exp(%x) : tensor<4xf64>", True),
        ("%e = aten.exp(%x) : tensor<4xf64>\n%a = aten.view(%e) : tensor<4xf64>", True),
        ("%a = aten.view(%x) : tensor<4xf64>", False),
        ("%a = aten.alias(%x) : tensor<4xf64>", False),
        ("%e = aten.exp(%x) : tensor<4xf64>\n%a = aten.dropout(%e, p = 0.5, train = false) : "
         "tensor<4xf64>", False),
        ("%e = aten.exp(%s) : tensor<1xf64>\n%a = aten.expand(%e) : tensor<4xf64>", False),
        ("%e = aten.exp(%x) : tensor<4xf64>\n%f = aten.neg(%e) : tensor<4xf64>\n"
         "%a = aten.view(%e) : tensor<4xf64>", False),
        ('%a = dist.all_gather(%h, axes = ["data"], dim = 0, block = 2) : tensor<4xf64>', False),
    ],
)  # fmt: skip
def test_sum_is_made_where_its_term_is_if_nothing_else_has_that_memory(
    makes: str, is_in_place: bool
) -> None:
    text = f"""
        input %x : tensor<4xf64>
        input %s : tensor<1xf64>
        input %h : tensor<2xf64>
        {makes}
        %r = dist.all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        output %r
    """
    program = step(text, "data=2", local=True)
    (reduce,) = [op for op in program.ops if op.name == "dist.all_reduce"]
    assert reduces_in_place(reduce) is is_in_place


def test_ops_that_may_return_what_they_are_given_make_no_memory() -> None:
    names = ("mm", "add.Tensor", "view", "alias", "contiguous", "dropout", "clone")
    made = {name for name in names if makes_memory(f"aten.{name}")}
    assert made == {"mm", "add.Tensor", "clone"}


def test_kernel_reads_of_a_table_what_it_takes_even_after_pointwise_ops() -> None:
    text = """
        input %x : tensor<64x500xf32>
        input %m : tensor<64x1xf32>
        input %i : tensor<64x1xi64>
        %s = aten.sub.Tensor(%x, %m) : tensor<64x500xf32>
        %g = aten.gather(%s, %i, dim = 1) : tensor<64x1xf32>
        %e = aten.exp(%s) : tensor<64x500xf32>
        output %g
        grad e = %e
    """
    sub, gather, _ = step(text).ops
    assert traffic([sub, gather]) == 64 * (4 + 8 + 4) + 2 * 64 * 500 * 4  # %s is read by exp
    sub, gather = step(re.sub(r".*%e.*", "", text)).ops
    assert traffic([sub, gather]) == 64 * (4 + 4 + 8 + 4)
    assert sum(accesses([sub, gather])[0].values()) == 64 * (4 + 4 + 8)


def test_reshape_that_copies_reads_and_writes() -> None:
    program = step("""
        input %x : tensor<2x3x4x5xf32>
        %a = aten.neg(%x) : tensor<2x3x4x5xf32>
        %p = aten.permute(%a, dims = [0, 2, 1, 3]) : tensor<2x4x3x5xf32>
        %v = aten.view(%p) : tensor<8x15xf32>
        output %v
    """)
    neg, permute, view = program.ops
    assert [copies(op) for op in program.ops] == [False, False, True]
    assert traffic([neg]) == traffic([view]) == traffic([neg, permute, view]) == 2 * 480


def test_results_of_a_region_share_the_memory_that_its_ops_show() -> None:
    program = step(
        """
        input %x : tensor<4x4xf32>
        %a = aten.view(%x) {phase = forward} : tensor<8x2xf32>
        %b = aten.relu(%x) {phase = forward} : tensor<4x4xf32>
        %c = aten.view(%b) {phase = forward} : tensor<16xf32>
        %d = aten.neg(%b) {phase = forward} : tensor<4x4xf32>
        output a = %a
        output b = %b
        output c = %c
        output d = %d
        """
    )
    ops = list(program.ops)
    fused = fuse(ops, program.return_op, [0, 1, 2, 3])
    (x,) = program.function.body.block.args
    a, b, c, d = fused.results
    assert [storage_of(value) for value in (a, b, c, d)] == [x, b, b, d]
    assert [is_unshared(value) for value in (a, b, c, d)] == [False, False, False, True]
