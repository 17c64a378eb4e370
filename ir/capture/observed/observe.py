# pyright: basic
# torch's tracing API is private and only partly typed.
"""Dynamo's view of a model's Python state: its writes, its dependencies, and their lines.

Dynamo runs the model's bytecode on symbols. It notes every object from outside the trace that the
code writes to, and guards every value from outside that the graph depends on. The graph shows
neither, so they are read here before dynamo forgets them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardweave.ir.capture.site import CaptureError, Site, qualified, site_of_frames, site_of_node
from shardweave.ir.torch_private import (
    AttributeMutationExisting,
    ConstDictVariable,
    TorchFunctionModes,
    TrackedDict,
    ValueMutationExisting,
    modified_variables,
    original_of,
    replaced,
)

ABSENT = object()
"""Marks a value that does not exist, such as that of a deleted attribute."""

UNKNOWN = object()
"""Marks a value that is no Python constant, such as a tensor."""

_MODULES = re.compile(r"L\['self'\](?:(?:\.__dict__\['_modules'\]|\._modules)\['[^']*'\])*")


@dataclass(frozen=True)
class Write:
    """A write of the model's code to an attribute, item or object that existed before the trace.
    place: its path from the model, as `blocks.0.count`. is_read: the graph depends on the old
    value."""

    place: str
    site: Site
    before: Any
    after: Any
    is_read: bool
    owner: Any = None
    """The object or dict that has the attribute or item; None for others, such as lists."""
    name: Any = ""


@dataclass
class Observation:
    """Facts noted while a model is traced. failed_in: the innermost module that raised an error.
    notes: sentences for the user. constants: tensors that became buffers of the model, by name.
    arrays: for each numpy array, by id of its fake tensor, a real tensor on the same memory.
    refusal: the reason why dynamo cannot trace the model, if calls are recorded instead."""

    writes: list[Write] = field(default_factory=list)
    leaf_hooks: list[tuple[str, Site]] = field(default_factory=list)
    """Names of parameters and inputs on which the code registers hooks while it runs, and where."""

    failed_in: str = ""
    notes: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    arrays: dict[int, Any] = field(default_factory=dict)
    refusal: CaptureError | None = None


@contextlib.contextmanager
def observed() -> Iterator[Observation]:
    """Observe dynamo's traces in the context; `writes` has the writes of the last trace."""
    observation = Observation()
    cleanup, record_module = original_of("graph's end"), original_of("module stack")

    def observing_cleanup(graph: Any) -> None:
        observation.writes = list(_writes(graph))
        observation.leaf_hooks = list(_leaf_hooks(graph))
        cleanup(graph)

    @contextlib.contextmanager
    def observing_module(key: str, source: Any, *rest: Any) -> Iterator[None]:
        with record_module(key, source, *rest):
            try:
                yield
            except Exception:
                observation.failed_in = observation.failed_in or qualified(source.name)
                raise
        observation.failed_in = ""  # whatever was raised inside has been caught there

    real_value = original_of("array")

    def observing_array(translator: Any, proxy: Any, tensor: Any) -> None:
        observation.arrays[id(proxy.node.meta.get("example_value"))] = tensor
        real_value(translator, proxy, tensor)

    news = {"graph's end": observing_cleanup, "module stack": observing_module}
    with replaced(news | {"array": observing_array}):
        yield observation


def _leaf_hooks(graph: Any) -> Iterator[tuple[str, Site]]:
    for tensor, *_ in graph.side_effects.tensor_hooks.values():
        users = tensor.proxy.node.users
        site = site_of_node(next(iter(users))) if users else Site()
        name = re.sub(r"\._(?:parameters|buffers)\['([^']*)'\]", r".\1", tensor.source.name)
        yield qualified(name), site


def _writes(graph: Any) -> Iterator[Write]:
    effects, read = graph.side_effects, _Read(graph)
    for variable in modified_variables(effects):
        if (
            not isinstance(
                variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)
            )
            or isinstance(vars(variable).get("value"), TrackedDict)
            or isinstance(variable, TorchFunctionModes)
        ):
            continue
        source = variable.source.name
        stacks = effects.mutation_user_stacks.get(variable) or [()]
        site = site_of_frames(_module_of(source), stacks[-1])
        attributes = effects.store_attr_mutations.get(variable, {})
        for name, value in attributes.items():
            before = _attribute(variable, name)
            yield Write(
                qualified(f"{source}.{name}"),
                site,
                before,
                _constant(value),
                before is ABSENT or read.attribute(source, name),
                vars(variable).get("value"),
                name,
            )
        if _is_set_of_old(variable):
            if set(variable.items) != set(variable.original_items):
                yield Write(qualified(source), site, UNKNOWN, UNKNOWN, True)
        elif isinstance(variable, ConstDictVariable):
            yield from _written_items(variable, site, read, _outside(graph, source))
        elif not attributes:
            yield Write(qualified(source), site, UNKNOWN, UNKNOWN, True)


def _is_set_of_old(variable: Any) -> bool:
    """True if a variable is a set that dynamo keeps as a dict, as before torch 2.13."""
    return isinstance(variable, ConstDictVariable) and issubclass(variable.python_type(), set)


def _outside(graph: Any, source: str) -> Any:
    """Evaluate a source outside the trace; None if that fails."""
    try:
        return eval(source, {"G": graph.global_scope, "L": graph.local_scope})
    except Exception:  # noqa: BLE001 - a source may be an expression of dynamo's own helpers
        return None


def _written_items(variable: Any, site: Site, read: _Read, owner: Any) -> Iterator[Write]:
    """Yield a write for each item of a dict that was replaced, added or removed."""
    source = variable.source.name
    items = {_key(key): value for key, value in variable.items.items()}
    olds = set(map(_key, variable.original_items))
    for key in [*items, *(olds - items.keys())]:
        value = items.get(key)
        place = f"{source}[{key!r}]"
        if value is not None and value.source is not None and value.source.name == place:
            continue
        before = UNKNOWN if key in olds else ABSENT
        after = ABSENT if value is None else _constant(value)
        is_read = before is ABSENT or after is ABSENT or read.item(source, key)
        known = owner if type(owner) is dict and before is ABSENT else None
        yield Write(qualified(place), site, before, after, is_read, known, key)


def _key(key: Any) -> Any:
    return getattr(key, "vt", key).as_python_constant()


def _attribute(variable: Any, name: str) -> Any:
    value = vars(variable).get("value")
    if value is None:  # a variable of an enclosing function
        return UNKNOWN
    # What the class has is not the object's own: assigning it hides it.
    own = vars(value) if hasattr(value, "__dict__") else None
    return getattr(value, name, ABSENT) if own is None else own.get(name, ABSENT)


def _constant(value: Any) -> Any:
    if type(value).__name__ == "DeletedVariable":
        return ABSENT
    if value.is_python_constant():
        return value.as_python_constant()
    if value.source is None:
        return UNKNOWN
    # From outside the trace, and not yet looked at, or an object.
    is_lazy = hasattr(value, "original_value") and not value.is_realized()
    outside = value.original_value() if is_lazy else vars(value.unwrap()).get("value", UNKNOWN)
    return UNKNOWN if isinstance(outside, Tensor) else outside


class _Read:
    """Values that a graph depends on, by the names of their sources."""

    def __init__(self, graph: Any) -> None:
        names = {guard.originating_source.name for guard in graph.guards}
        names |= {key.name for key in graph.input_source_to_var if hasattr(key, "name")}
        self.names = names
        self.lengths: set[str] = set()
        self.keys: set[tuple[str, str]] = set()
        for guard in graph.guards:
            source, kind = guard.originating_source.name, guard.create_fn_name()
            if kind.endswith("CONTAINS"):
                self.keys.add((source, repr(guard.create_fn.keywords["key"])))
            elif kind == "SEQUENCE_LENGTH":
                self.lengths.add(source)

    def attribute(self, source: str, name: str) -> bool:
        return self._any(f"{source}.{name}", f"{source}.__dict__['{name}']")

    def item(self, source: str, key: Any) -> bool:
        is_member = source in self.lengths or (source, repr(key)) in self.keys
        return is_member or self._any(f"{source}[{key!r}]")

    def _any(self, *places: str) -> bool:
        parts = tuple(place + mark for place in places for mark in ".[")
        return any(name in places or name.startswith(parts) for name in self.names)


def _module_of(source: str) -> str:
    modules = _MODULES.match(source)
    return "" if modules is None else qualified(modules[0])
