"""The repeated blocks of a model, read off its module tree.

A block does more than one linear map: it holds two or more weights (parameters of two or more
dims). Blocks are, of the first of these kinds that a model has:

1. The members of a container (ModuleList, Sequential, ModuleDict) in which such a class repeats,
   or stands alone; whatever else stands between them is a member too. Of nested containers it is
   the outermost, unless its members are stages: containers themselves, or modules that all hold
   such containers and are not alike (no two share half of their parameters' names and shapes, or
   the numbers of their blocks differ). The blocks of stages are blocks.
2. Attributes of one module that have the same class and parameter names (`block_a`, `block_b`),
   and a module that is called more than once.
3. The members of a container of nothing but layers of one class with weights.

So the experts of a mixture are no blocks, nor are Linear, ReLU, Linear in a Sequential.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

Members = Mapping[str, nn.Module]
"""Modules by path."""


def block_paths(model: nn.Module, called_again: Collection[str] = ()) -> list[str]:
    """List the paths of all blocks in the order of the module tree. called_again: the paths of
    modules that are called more than once in a step."""
    return (
        list(_in_containers(model, ""))
        or list(_siblings(model, "", called_again))
        or list(_equal_layers(model, ""))
    )


def _children(module: nn.Module, path: str) -> dict[str, nn.Module]:
    prefix = f"{path}." if path else ""
    # named_children leaves out further names of a shared module.
    children = module._modules.items()  # pyright: ignore[reportPrivateUsage]
    return {prefix + name: child for name, child in children if child is not None}


def _is_compound(module: nn.Module) -> bool:
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def _in_containers(module: nn.Module, path: str) -> Iterator[str]:
    members = _children(module, path)
    blocks = _compound_members(module, members)
    if blocks and not _are_stages(blocks):
        yield from members
        return
    for name, child in members.items():
        yield from _in_containers(child, name)


def _compound_members(module: nn.Module, members: Members) -> dict[str, nn.Module]:
    """Return members with 2 or more weights, if two share a class or there is only one member."""
    if not isinstance(module, CONTAINERS):
        return {}
    compound = {name: child for name, child in members.items() if _is_compound(child)}
    counts = Counter(map(type, compound.values()))
    is_repeated = len(members) == 1 or any(count > 1 for count in counts.values())
    return compound if is_repeated else {}


def _are_stages(members: Members) -> bool:
    inner = [len(list(_in_containers(child, name))) for name, child in members.items()]
    if not all(inner):
        return False
    if all(isinstance(child, CONTAINERS) for child in members.values()):
        return True
    return len(members) > 1 and (len(set(inner)) > 1 or not _are_alike(members))


def _are_alike(members: Members) -> bool:
    """True if some two neighbours share at least half of their parameters' names and shapes."""
    forms = [
        {(name, parameter.shape) for name, parameter in child.named_parameters()}
        for child in members.values()
    ]
    return any(2 * len(a & b) >= len(a | b) for a, b in pairwise(forms))


def _siblings(module: nn.Module, path: str, called_again: Collection[str]) -> Iterator[str]:
    children = _children(module, path)
    forms = {
        name: (type(child), tuple(name for name, _ in child.named_parameters()))
        for name, child in children.items()
        if _is_compound(child)
    }
    counts = Counter(forms.values())
    for name, child in children.items():
        if name in forms and (name in called_again or counts[forms[name]] > 1):
            yield name
        else:
            yield from _siblings(child, name, called_again)


def _equal_layers(module: nn.Module, path: str) -> Iterator[str]:
    members = _children(module, path)
    has_weights = any(True for child in members.values() for _ in child.parameters())
    is_list = isinstance(module, CONTAINERS) and len(members) > 1
    if is_list and has_weights and len(set(map(type, members.values()))) == 1:
        yield from members
        return
    for name, child in members.items():
        yield from _equal_layers(child, name)
