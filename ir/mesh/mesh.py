"""Device meshes: an ordered list of named axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from shardweave.ir.suggest import did_you_mean

AxisKind = Literal["space", "time", "stage"]

MOST_RANKS = 4096
"""Limit on the ranks of a virtual mesh: one process runs all of them."""

MOST_DEVICES = 2**20
"""Limit on the devices of a mesh, beyond any cluster: some tables have an entry for each rank."""

STAGES = ("stage", "pipeline")
"""Axis names that imply the kind stage where no kind is given."""


@dataclass(frozen=True)
class Axis:
    """One mesh axis. Along a `space` axis devices share work; along a `time` axis sub-batches run
    in turn; along a `stage` axis devices hold different layers, so no value is sharded over it.

    Raises ValueError for a name that is not a word, or a size below 1.
    """

    name: str
    size: int
    kind: AxisKind = "space"

    def __post_init__(self) -> None:
        if not self.name.replace("_", "a").replace(".", "a").isalnum():
            raise ValueError(
                f"mesh axis name '{self.name}' is not a word; use letters, digits, '_' and '.'."
            )
        if not isinstance(self.size, int) or isinstance(self.size, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"mesh axis '{self.name}' has size {self.size!r}; use a whole number.")
        if self.size > MOST_DEVICES:
            raise ValueError(f"mesh axis '{self.name}' must have at most {MOST_DEVICES:,} devices.")
        if self.size < 1:
            raise ValueError(f"mesh axis '{self.name}' has size {self.size}; use a size >= 1.")


@dataclass(frozen=True, init=False)
class Mesh:
    """An ordered list of named axes; ranks are numbered row-major, the last axis fastest.

    `Mesh(data=2, tensor=4)` has 8 devices, and ranks 0-3 differ in `tensor` only. Raises ValueError
    for a name that is given twice, and for several axes of kind stage.
    """

    axes: tuple[Axis, ...]

    def __init__(self, axes: Iterable[Axis] = (), /, **sizes: int) -> None:
        all_axes = (*axes, *(_axis(name, size) for name, size in sizes.items()))
        names = [axis.name for axis in all_axes]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh axes {names} are not distinct; name each axis once.")
        if sum(axis.kind == "stage" for axis in all_axes) > 1:
            raise ValueError(f"mesh axes {names}: at most one may be of kind stage.")
        if math.prod(axis.size for axis in all_axes) > MOST_DEVICES:
            sizes_text = ",".join(f"{axis.name}={axis.size}" for axis in all_axes)
            raise ValueError(
                f"the mesh {sizes_text} has more than {MOST_DEVICES:,} devices; use a smaller one."
            )
        object.__setattr__(self, "axes", all_axes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of the axes, cached: meshes are looked up far more often than made."""
        return hash(self.axes)

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        """Pickle without the cached hash, which differs between processes."""
        return Mesh, (self.axes,)

    @staticmethod
    def parse(text: str, num_devices: int | None = None) -> Mesh:
        """Read `data=2,tensor=4`. The empty text is the mesh of one device without axes.

        num_devices: if given, one axis may have the size -1, as in `data=-1,tensor=4`, and takes
        the devices that the others leave. Raises ValueError for text that is no mesh, and if the
        other sizes do not divide `num_devices`.
        """
        sizes: list[tuple[str, int]] = []
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not (
                (size.isascii() and size.isdigit()) or (size == "-1" and num_devices is not None)
            ):
                why = "; -1 stands for the processes that are left" if size == "-1" else ""
                raise ValueError(
                    f"mesh '{text}': found '{part}', expected NAME=SIZE, as in data=2,tensor=4"
                    f"{why}."
                )
            sizes.append((name, int(size[:19])))  # of more digits, as many are too many already
        rest = 1 if num_devices is None else _rest(text, [s for _, s in sizes], num_devices)
        return Mesh(_axis(name, rest if size == -1 else size) for name, size in sizes)

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one device"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes, in order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def space_axes(self) -> tuple[Axis, ...]:
        """The axes that values may be sharded over."""
        return tuple(axis for axis in self.axes if axis.kind == "space")

    @property
    def device_axes(self) -> tuple[Axis, ...]:
        """The axes along which devices differ: the axes of kind space and stage."""
        return tuple(axis for axis in self.axes if axis.kind != "time")

    @property
    def stage_axis(self) -> Axis | None:
        """The axis of kind stage, if there is one."""
        return next((axis for axis in self.axes if axis.kind == "stage"), None)

    @property
    def num_stages(self) -> int:
        """The devices along the stage axis; 1 without one."""
        return 1 if self.stage_axis is None else self.stage_axis.size

    @property
    def within_stage(self) -> Mesh:
        """The mesh of the devices of one stage."""
        return Mesh(self.space_axes)

    @property
    def time_names(self) -> tuple[str, ...]:
        """The names of the axes over which sub-batches run one after another."""
        return tuple(axis.name for axis in self.axes if axis.kind == "time")

    @property
    def num_devices(self) -> int:
        """The product of the sizes of the axes of devices."""
        return math.prod(axis.size for axis in self.device_axes)

    def size(self, name: str) -> int:
        """Size of an axis. Raises ValueError if the mesh has no such axis."""
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        raise ValueError(
            f"the mesh {self} has no axis '{name}'; its axes are {list(self.names)}; "
            f"{did_you_mean(name, self.names)}use one of them, or add '{name}' to the mesh."
        )

    def sizes(self, names: Sequence[str]) -> int:
        """Product of the sizes of several axes."""
        return math.prod(self.size(name) for name in names)

    def parts(self, name: str) -> tuple[str, ...]:
        """The axes into which axis `name` is factored, major to minor; itself if it is whole."""
        digits = [axis for axis in self.names if whole_axis(axis) == name]
        return (name,) if name in self.names or not digits else tuple(digits)

    def factored(self, name: str, sizes: Sequence[int]) -> Mesh:
        """Split axis `name` into axes `name.0`, `name.1`, .. of `sizes`, major to minor.

        `Mesh(data=2, tensor=4).factored("tensor", (2, 2))` is data=2,tensor.0=2,tensor.1=2, and
        every rank keeps its number. Raises ValueError if the sizes do not multiply to the axis'.
        """
        if self.size(name) != math.prod(sizes):
            raise ValueError(
                f"mesh axis '{name}' has size {self.size(name)} and cannot be factored into "
                f"{list(sizes)}, whose product is {math.prod(sizes)}; give factors whose product "
                "is its size."
            )
        axes: list[Axis] = []
        for axis in self.axes:
            if axis.name == name:
                axes += [Axis(f"{name}.{i}", size, axis.kind) for i, size in enumerate(sizes)]
            else:
                axes.append(axis)
        return Mesh(axes)

    def refined(self, sizes: Mapping[str, int]) -> Mesh:
        """Split each axis for which `sizes` has digits `name.0`, `name.1`, ..; self if there is
        none.

        A plan made for tensor.0=2,tensor.1=2 can so run on tensor=4: ranks keep their numbers.
        """
        mesh = self
        for axis in self.axes:
            digits: list[int] = []
            while (digit := f"{axis.name}.{len(digits)}") in sizes:
                digits.append(sizes[digit])
            if axis.name not in sizes and math.prod(digits) == axis.size and digits:
                mesh = mesh.factored(axis.name, digits)
        return mesh

    def on_parts_of(self, other: Mesh) -> Mesh:
        """This mesh, with axes split into parts as in `other`."""
        return self.refined({axis.name: axis.size for axis in other.axes})

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis of devices."""
        coordinates: dict[str, int] = {}
        for axis in reversed(self.device_axes):
            rank, coordinates[axis.name] = divmod(rank, axis.size)
        return coordinates

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at given coordinates of the axes of devices."""
        return self.position([axis.name for axis in self.device_axes], coordinates)

    def position(self, names: Sequence[str], coordinates: Mapping[str, int]) -> int:
        """The row-major index of `coordinates` on the axes `names`, the first axis slowest."""
        position = 0
        for name in names:
            position = position * self.size(name) + coordinates[name]
        return position

    def groups(self, names: Sequence[str]) -> list[list[int]]:
        """The groups of ranks that communicate in a collective over the axes `names`.

        Within a group, ranks are ordered by their coordinates on `names`, the first name slowest,
        so that member i holds shard i of a dim sharded over `names`.
        """
        rest = [axis for axis in self.device_axes if axis.name not in names]
        groups: list[list[int]] = []
        for outer in product(*(range(axis.size) for axis in rest)):
            fixed = {axis.name: index for axis, index in zip(rest, outer, strict=True)}
            members = product(*(range(self.size(name)) for name in names))
            groups.append(
                [self.rank(fixed | dict(zip(names, inner, strict=True))) for inner in members]
            )
        return groups


def whole_axis(axis: str) -> str:
    """The axis that was split into `axis`, such as tensor.1, and others; itself if it is whole."""
    name, _, digit = axis.rpartition(".")
    return name if name and digit.isdigit() else axis


def check_virtual(mesh: Mesh) -> None:
    """Raises ValueError for a mesh with more than `MOST_RANKS` ranks."""
    count = math.prod(axis.size for axis in mesh.axes)
    if count > MOST_RANKS:
        raise ValueError(
            f"the mesh {mesh} has {count:,} ranks, but one process can run at most "
            f"{MOST_RANKS:,}; give a smaller mesh, or start one process for each rank."
        )


def _rest(text: str, sizes: Sequence[int], num_devices: int) -> int:
    """The devices left for the axis of size -1; 1 without such an axis."""
    count, others = sizes.count(-1), math.prod(size for size in sizes if size != -1)
    if count > 1:
        raise ValueError(f"mesh '{text}' has {count} axes of size -1; use -1 once at most.")
    if count and (others < 1 or num_devices % others):
        raise ValueError(
            f"mesh '{text}': {num_devices} devices are not a multiple of {others}, the product "
            f"of the given sizes; start a multiple of {others} processes, or give other sizes."
        )
    return num_devices // others if count else 1


def _axis(name: str, size: int) -> Axis:
    """An axis whose kind follows from its name."""
    return Axis(name, size, "stage" if name in STAGES else "space")
