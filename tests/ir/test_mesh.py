"""Meshes: their text, the numbering of ranks, and the groups of collectives."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.ir.mesh.mesh import Axis, Mesh, check_virtual

MESH = Mesh(data=2, tensor=3)
TIMED = Mesh([Axis("batch", 4, "time")], data=2, tensor=3)


def test_text_of_a_mesh_parses_back() -> None:
    assert Mesh.parse("data=2,tensor=3") == MESH
    assert Mesh.parse(" data = 2 , tensor = 3 ") == MESH
    assert str(MESH) == "data=2,tensor=3"


def test_empty_text_is_one_device() -> None:
    assert Mesh.parse("") == Mesh()
    assert Mesh().num_devices == 1
    assert str(Mesh()) == "one device"
    assert Mesh().coordinates(0) == {}
    assert Mesh().groups(()) == [[0]]


@pytest.mark.parametrize(
    "text", ["data", "data=", "data=two", "data=-2", "data=2.0", "=2", "a b=2"]
)
def test_text_that_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected NAME=SIZE|is not a word"):
        Mesh.parse(text)


def test_axis_of_size_minus_one_takes_the_devices_that_are_left() -> None:
    assert Mesh.parse("data=-1,tensor=2", 6) == Mesh(data=3, tensor=2)
    assert Mesh.parse("data=-1", 1) == Mesh(data=1)
    assert Mesh.parse("data=2", 6) == Mesh(data=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=-1,tensor=-1", "has 2 axes of size -1; use -1 once at most"),
        ("data=-1,tensor=2", "3 devices are not a multiple of 2, the product of the given sizes"),
        ("data=-1,tensor=0", "3 devices are not a multiple of 0"),
        ("data=-2", "found 'data=-2', expected NAME=SIZE"),
    ],
)
def test_axis_that_cannot_take_what_is_left_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh.parse(text, 3)


def test_axis_of_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'data' has size 0; use a size >= 1"):
        Mesh(data=0)


def test_axes_must_be_distinct() -> None:
    with pytest.raises(ValueError, match=r"\['a', 'a'\] are not distinct"):
        Mesh.parse("a=2,a=2")


def test_factored_axes_have_dots_in_their_names() -> None:
    mesh = Mesh([Axis("tensor.0", 2), Axis("tensor.1", 2)])
    assert Mesh.parse(str(mesh)) == mesh


def test_sizes_are_looked_up_by_name() -> None:
    assert MESH.size("tensor") == 3
    assert MESH.sizes(["tensor", "data"]) == 6
    assert MESH.sizes([]) == 1
    with pytest.raises(ValueError, match=r"has no axis 'pipe'; its axes are \['data', 'tensor'\]"):
        MESH.size("pipe")
    with pytest.raises(
        ValueError, match=r"; did you mean 'data'\? use one of them, or add 'date' to"
    ):
        MESH.size("date")


def test_last_axis_runs_fastest() -> None:
    assert [MESH.coordinates(rank)["tensor"] for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [MESH.coordinates(rank)["data"] for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_rank_is_the_inverse_of_coordinates() -> None:
    for mesh in (MESH, TIMED):
        assert [mesh.rank(mesh.coordinates(r)) for r in range(mesh.num_devices)] == list(range(6))


def test_time_axes_are_no_devices() -> None:
    assert TIMED.num_devices == 6
    assert TIMED.coordinates(5) == {"data": 1, "tensor": 2}
    assert [axis.name for axis in TIMED.space_axes] == ["data", "tensor"]
    assert TIMED.size("batch") == 4
    assert TIMED.groups(["tensor"]) == MESH.groups(["tensor"])


def test_groups_differ_in_the_named_axes_only() -> None:
    assert MESH.groups(["tensor"]) == [[0, 1, 2], [3, 4, 5]]
    assert MESH.groups(["data"]) == [[0, 3], [1, 4], [2, 5]]


def test_members_of_a_group_are_ordered_by_the_names_given() -> None:
    assert MESH.groups(["data", "tensor"]) == [[0, 1, 2, 3, 4, 5]]
    assert MESH.groups(["tensor", "data"]) == [[0, 3, 1, 4, 2, 5]]


def test_meshes_are_equal_as_data() -> None:
    assert Mesh(data=2, tensor=3) == MESH
    assert hash(Mesh(data=2, tensor=3)) == hash(MESH)
    assert Mesh(tensor=3, data=2) != MESH
    assert TIMED != Mesh(batch=4, data=2, tensor=3)


def test_factored_axis_keeps_every_rank_in_its_place() -> None:
    mesh = Mesh(data=2, tensor=6)
    digits = mesh.factored("tensor", (3, 2))
    assert str(digits) == "data=2,tensor.0=3,tensor.1=2"
    assert digits.groups(("tensor.0", "tensor.1")) == mesh.groups(("tensor",))
    for rank in range(mesh.num_devices):
        place = digits.coordinates(rank)
        assert 2 * place["tensor.0"] + place["tensor.1"] == mesh.coordinates(rank)["tensor"]


def test_factors_must_multiply_to_the_size() -> None:
    with pytest.raises(ValueError, match=r"\[2, 2\], whose product is 4; give factors"):
        Mesh(tensor=6).factored("tensor", (2, 2))


def test_mesh_is_refined_by_the_digits_of_its_axes_alone() -> None:
    mesh = Mesh(data=2, tensor=4)
    refined = mesh.refined({"data": 2, "tensor.0": 2, "tensor.1": 2})
    assert str(refined) == "data=2,tensor.0=2,tensor.1=2"
    for other in ({"data": 2, "tensor": 4}, {"tensor.0": 2, "tensor.1": 4}, {"model": 4}, {}):
        assert mesh.refined(other) == mesh


@pytest.mark.parametrize(
    "text", ["data=1048577", "data=99999999999999999999", f"data={'9' * 5000}", "a=1024,b=1025"]
)
def test_mesh_of_more_devices_than_there_are_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1,048,576 devices"):
        Mesh.parse(text)


@pytest.mark.parametrize("size", [2.0, True, "2", None])
def test_size_that_is_no_whole_number_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="use a whole number"):
        Mesh(data=size)


def test_virtual_mesh_has_a_limit_of_its_own() -> None:
    check_virtual(Mesh(data=4096))
    with pytest.raises(ValueError, match="has 8,192 ranks, but one process can run at most 4,096"):
        check_virtual(Mesh(data=4096, tensor=2))
