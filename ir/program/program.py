"""A program: one training step as text, with the views of it that tools need."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir.dialects.annotations import (
    describe,
    layer_of,
    sharding_attrs_of,
    wanted_attrs_of,
)
from shardweave.ir.dialects.attributes import MeshAttr, ShardingAttr
from shardweave.ir.dialects.literals import to_attribute, to_python
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program_stats import ProgramStats
from shardweave.ir.program.text import ProgramTextError, SourceText, parse_module, print_module

MESH = "dist.mesh"
LOCAL = "dist.local"
DEVICES = "dist.devices"
HOST_STATES = "dist.host_states"
"""Mark of a program whose optimizer states live on the host between updates."""
USED = "dist.used"
"""Attribute of a parameter: the sharding in which ops read it, if it is stored in another one."""
PARTS = "dist.parts"
PART = "dist.part"
"""Attribute of a fused projection's weight: the number of linear maps that `split-projections`
makes of it, and the sharding in which each reads its part."""


INPUT_GRADIENT = "gradient of "
"""Prefix of the name of an output that is an input's gradient; the input's name follows."""

TANGENT = "tangent of "
"""Prefix of the name of an input that is an output's gradient; the output's name follows."""


@dataclass(frozen=True)
class Slot:
    """One argument or result of the step.

    kind: param, buffer, input or tangent for arguments; output, grad or buffer for results.
    name: qualified name, or the name of the argument. value: the SSA value.
    """

    kind: str
    name: str
    value: SSAValue
    attributes: builtin.DictionaryAttr

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other qualified names of a tied parameter."""
        attribute = self.attributes.data.get("dist.aliases")
        names = to_python(attribute) if attribute is not None else None
        return tuple(map(str, names)) if isinstance(names, list) else ()

    @property
    def sharding_attr(self) -> ShardingAttr | None:
        given = self.attributes.data.get("dist.sharding")
        return given if isinstance(given, ShardingAttr) else None


class Program:
    """A training step (or a forward pass) as an xDSL module.

    A *global* program computes what the eager model computes. After `insert-collectives` it
    is *local*: what each rank of `mesh` runs.
    """

    def __init__(self, module: builtin.ModuleOp, source: SourceText | None = None) -> None:
        self.module = module
        self.source = source
        """The text that the ops were parsed from, if they were; a copy has none."""
        self._mesh: tuple[Attribute | None, Mesh | None] = None, None
        """The mesh attribute that was read last, and its `Mesh`."""

    # Text

    @staticmethod
    def parse(text: str, name: str = "<text>") -> Program:
        """Read a program's text, called `name` in errors. Raises ProgramTextError."""
        return Program(*parse_module(text, name))

    @staticmethod
    def load(path: str | Path) -> Program:
        """Read the file at `path`. Raises ProgramTextError, OSError if there is none."""
        try:
            text = Path(path).read_text()
        except UnicodeDecodeError as error:
            raise ProgramTextError(
                f"file '{path}' is not text; give the file of a program, as `shardweave capture` "
                "writes it."
            ) from error
        return Program.parse(text, str(path))

    def save(self, path: str | Path) -> None:
        """Write the text, with source locations."""
        Path(path).write_text(print_module(self.module, locations=True))

    def __str__(self) -> str:
        return print_module(self.module)

    def digest(self) -> str:
        """The SHA-256 of the text, in hexadecimal, by which other files identify the program."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __repr__(self) -> str:
        mesh = f" on mesh {self.mesh}" if self.mesh else ""
        kind = "local" if self.is_local else "global"
        return f"<{kind} program of {sum(1 for _ in self.ops)} ops{mesh}>"

    def _repr_html_(self) -> str:
        """The layers, folded, for a notebook."""
        return _call("shardweave.ir.inspect.outline:program_html", self)

    def __eq__(self, other: object) -> bool:
        """True if both have the same structure, types and annotations; names do not count."""
        return isinstance(other, Program) and self.module.is_structurally_equivalent(other.module)

    __hash__ = object.__hash__

    def clone(self) -> Program:
        """A copy that shares no op with this one."""
        return Program(self.module.clone())

    # Parts

    @property
    def function(self) -> func.FuncOp:
        """The function `@step`."""
        return cast(func.FuncOp, self.module.body.block.first_op)

    @property
    def ops(self) -> Iterator[Operation]:
        """The ops of the step in order, without the return."""
        for op in self.function.body.block.ops:
            if type(op) is not func.ReturnOp:  # isinstance takes longer than the rest
                yield op

    @property
    def return_op(self) -> func.ReturnOp:
        """The last op of the step, which reads its results."""
        return cast(func.ReturnOp, self.function.body.block.last_op)

    @property
    def arguments(self) -> list[Slot]:
        """Parameters, buffers and inputs, in the order in which the step takes them."""
        return _slots(self.function.body.block.args, self.function.arg_attrs)

    @property
    def results(self) -> list[Slot]:
        """Outputs, gradients and new buffers, in the order in which the step returns them."""
        return _slots(self.return_op.operands, self.function.res_attrs)

    def set_argument_attributes(self, name: str, values: Mapping[int, Attribute | None]) -> None:
        """Set an attribute of several arguments. values: by argument index; None removes it."""
        count = len(self.function.body.block.args)
        self.function.arg_attrs = _with(self.function.arg_attrs, count, name, values)

    def set_result_attributes(self, name: str, values: Mapping[int, Attribute | None]) -> None:
        """Set an attribute of several results. values: by result index; None removes it."""
        count = len(self.return_op.operands)
        self.function.res_attrs = _with(self.function.res_attrs, count, name, values)

    def reorder(self, order: Iterable[Operation]) -> None:
        """Put the ops in another order (a permutation of them)."""
        block, last = self.function.body.block, self.return_op
        for op in order:
            op.detach()
            block.insert_op_before(op, last)

    def replace_body(self, block: Block) -> None:
        """Replace the step's body by `block`, whose arguments and return have the same slots."""
        region = self.function.body
        region.erase_block(0)
        region.add_block(block)
        self.function.function_type = builtin.FunctionType.from_lists(
            list(block.arg_types), list(self.return_op.operand_types)
        )

    # Mesh

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the program is for; None if it is not set."""
        attribute = self.module.attributes.get(MESH)
        if attribute is not self._mesh[0]:
            self._mesh = attribute, attribute.mesh if isinstance(attribute, MeshAttr) else None
        return self._mesh[1]

    def needed_mesh(self) -> Mesh:
        """The mesh. Raises ValueError for a program without one."""
        if self.mesh is None:
            raise ValueError("the program has no mesh; give one (mesh=..., or --mesh data=2).")
        return self.mesh

    def set_mesh(self, mesh: Mesh) -> None:
        """Set the mesh that the program is for."""
        self.module.attributes[MESH] = MeshAttr.of(mesh)

    @property
    def devices(self) -> tuple[int, ...]:
        """The device and process number of each rank; empty if rank r has number r. Raises
        ValueError unless there is one distinct number for each rank."""
        attribute = self.module.attributes.get(DEVICES)
        if attribute is None:
            return ()
        is_list = isinstance(attribute, builtin.ArrayAttr)
        given = to_python(cast("Attribute", attribute)) if is_list else None
        count = self.mesh.num_devices if self.mesh else 1
        numbers = cast("list[object]", given) if isinstance(given, list) else []
        devices = tuple(number for number in numbers if isinstance(number, int) and number >= 0)
        if len(set(devices)) != count or len(numbers) != count:
            raise ValueError(
                f"the attribute {DEVICES} is {attribute}, expected {count} distinct device "
                f"numbers, one for each rank of the mesh {self.mesh or 'of one device'}."
            )
        return devices

    def set_devices(self, devices: Sequence[int]) -> None:
        """Store the device number of each rank; store nothing if rank r has number r."""
        if tuple(devices) in ((), tuple(range(len(devices)))):
            self.module.attributes.pop(DEVICES, None)
        else:
            self.module.attributes[DEVICES] = to_attribute(list(devices))

    @property
    def is_local(self) -> bool:
        """True if collectives are inserted and types have the shapes of shards."""
        return LOCAL in self.module.attributes

    def set_local(self) -> None:
        """Mark the program local: collectives are inserted, and types have the shapes of shards."""
        self.module.attributes[LOCAL] = builtin.UnitAttr()

    @property
    def has_host_states(self) -> bool:
        """True if optimizer states live on the host between updates."""
        return HOST_STATES in self.module.attributes

    def set_host_states(self) -> None:
        """Mark the program: optimizer states live on the host between updates."""
        self.module.attributes[HOST_STATES] = builtin.UnitAttr()

    def global_shape_of(self, slot: Slot) -> tuple[int, ...]:
        """The global shape of an argument or result, also in a local program."""
        shape = shape_of(slot.value)
        return self.sharding_of_slot(slot).global_shape(shape) if self.is_local else shape

    def sharding_of_slot(self, slot: Slot, *, used: bool = False) -> Sharding:
        """The sharding of an argument or result; replicated where none is given.

        used: return the sharding in which ops read an argument (`dist.used`), if it has one.
        Raises ValueError, naming the slot, if its annotation does not fit it.
        """
        name = USED if used and USED in slot.attributes.data else "dist.sharding"
        given = slot.attributes.data.get(name)
        if given is not None and not isinstance(given, ShardingAttr):
            raise ValueError(
                f"{slot.kind} '{slot.name}': {name} is {given}, expected #dist.sharding<..>."
            )
        try:
            return sharding_of(given, shape_of(slot.value), self)
        except ValueError as error:
            raise ValueError(f"{slot.kind} '{slot.name}': {error}") from error

    # Views

    def stats(self) -> ProgramStats:
        """Ops and FLOPs by phase, parameter bytes, collectives by kind, axes and phase."""
        return _call("shardweave.ir.inspect.stats:stats", self)

    def layers(self) -> dict[str, list[Operation]]:
        """The ops of each layer, in order of first appearance."""
        layers: dict[str, list[Operation]] = {}
        for op in self.ops:
            layers.setdefault(layer_of(op), []).append(op)
        return layers


def _call(function: str, program: Program) -> Any:
    """Call a function of a program by its qualified name: this file cannot import it."""
    return resolve_name(function)(program)


def sharding_of(
    attribute: ShardingAttr | None, shape: tuple[int, ...], program: Program
) -> Sharding:
    """The sharding that an attribute describes; replicated if None. shape: global, or the shard's
    in a local program."""
    mesh = program.mesh
    if attribute is None or mesh is None:
        return Sharding.replicated(len(shape))
    return attribute.on_local(shape, mesh) if program.is_local else attribute.on(shape, mesh)


def shardings_of(op: Operation, program: Program) -> list[Sharding | None]:
    """The annotated sharding of each result of an op, or None. Raises ValueError, naming the op,
    if a sharding does not fit its result."""
    return _read(op, sharding_attrs_of(op), program)


def wishes_of(op: Operation, program: Program) -> list[Sharding | None]:
    """The sharding that a plan or a user asks of each result of an op, or None. Raises ValueError,
    naming the op, if a sharding does not fit its result."""
    return _read(op, wanted_attrs_of(op), program)


def _read(
    op: Operation, attributes: Sequence[ShardingAttr] | None, program: Program
) -> list[Sharding | None]:
    if attributes is None:
        return [None] * len(op.results)
    try:
        return [
            sharding_of(attribute, shape_of(result), program)
            for attribute, result in zip(attributes, op.results, strict=True)
        ]
    except ValueError as error:
        raise ValueError(f"{describe(op)}: {error}") from error


def _slots(
    values: Sequence[SSAValue], attributes: builtin.ArrayAttr[builtin.DictionaryAttr] | None
) -> list[Slot]:
    pairs = zip(values, _dictionaries(attributes, len(values)), strict=True)
    return [Slot(_word(a, "dist.kind"), _word(a, "dist.name"), value, a) for value, a in pairs]


def _word(attributes: builtin.DictionaryAttr, name: str) -> str:
    attribute = attributes.data.get(name)
    return attribute.data if isinstance(attribute, builtin.StringAttr) else ""


def _dictionaries(
    attributes: builtin.ArrayAttr[builtin.DictionaryAttr] | None, count: int
) -> list[builtin.DictionaryAttr]:
    if attributes is None:
        return [builtin.DictionaryAttr({})] * count
    return list(attributes.data)


def _with(
    attributes: builtin.ArrayAttr[builtin.DictionaryAttr] | None,
    count: int,
    name: str,
    values: Mapping[int, Attribute | None],
) -> builtin.ArrayAttr[builtin.DictionaryAttr]:
    entries = _dictionaries(attributes, count)
    for index, value in values.items():
        data = {key: old for key, old in entries[index].data.items() if key != name}
        if value is not None:
            data[name] = value
        entries[index] = builtin.DictionaryAttr(data)
    return builtin.ArrayAttr(entries)


def require_program(*values: object) -> None:
    """Raise ValueError for a value, given as a program, that is none."""
    for value in values:
        if not isinstance(value, Program):
            raise ValueError(
                f"a {type(value).__name__} is given in place of a program; capture a model with "
                "sw.capture(model, args), or read a file with sw.load(path)."
            )
