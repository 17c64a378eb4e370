"""Results that own their memory."""

from __future__ import annotations

import torch
from torch import Tensor

from shardweave.backends.step.running import memory_of, owned


def shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_a_value_that_is_returned_twice_is_copied_once() -> None:
    x = torch.randn(3)
    found = owned({"a": x, "b": x}, {})
    assert not shares(found["a"], found["b"])
    assert torch.equal(found["a"], found["b"])


def test_a_view_of_an_argument_is_copied() -> None:
    x = torch.randn(4, 4)
    found = owned({"rows": x[:2], "same": x}, memory_of([x]))
    assert not shares(found["rows"], x)
    assert not shares(found["same"], x)
    assert not shares(found["rows"], found["same"])


def test_an_expanded_value_becomes_contiguous() -> None:
    found = owned({"a": torch.ones(()).expand(3, 2)}, {})
    assert found["a"].is_contiguous()
    found["a"].mul_(torch.arange(6.0).reshape(3, 2))
    assert found["a"].sum() == 15


def test_disjoint_parts_of_one_buffer_are_not_copied() -> None:
    buffer = torch.randn(10)
    found = owned({"a": buffer[:4], "b": buffer[4:]}, {})
    assert shares(found["a"], buffer)
    assert shares(found["b"], buffer)


def test_overlapping_parts_of_one_buffer_are_parted() -> None:
    buffer = torch.arange(10.0)
    found = owned({"a": buffer[:6], "b": buffer[4:], "c": buffer[5:7], "e": buffer[:0]}, {})
    for tensor in found.values():
        tensor.add_(100)
    assert found["a"].tolist() == [100, 101, 102, 103, 104, 105]
    assert found["b"].tolist() == [104, 105, 106, 107, 108, 109]
    assert found["c"].tolist() == [105, 106]
