"""A stand-in for an optimizer of DTensors: of the same class and state, on plain tensors."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.plain import PlainParameters
from shardweave.backends.optimizers.spread import Spread
from shardweave.ir.capture.update.reads import FORMS
from shardweave.ir.torch_private import pytree

_OWN = ("param_groups", "state", "step")


class StandIns:
    """Stand-ins for an optimizer, and for those that it holds and calls, during one step."""

    def __init__(self, optimizer: Optimizer, plain: PlainParameters) -> None:
        self.plain = plain
        self._made: dict[int, Any] = dict(plain.made)
        """Stand-ins by the identity of the real: tensors, lists of groups, and optimizers."""
        self._of: dict[int, Any] = dict(plain.of)
        self._pairs: list[tuple[Optimizer, Optimizer]] = []
        self.first = self._stand_in(optimizer)

    def _stand_in(self, real: Optimizer) -> Optimizer:
        made = object.__new__(type(real))
        self._keep(real, made)
        self._pairs.append((real, made))
        made.param_groups = self._made.get(id(real.param_groups)) or self._groups(real)
        made.state = self._made.get(id(real.state)) or self._state(real)
        for name, value in vars(real).items():
            if name not in _OWN:
                vars(made)[name] = self._mapped(value, self._made, self._stand_in)
        return made

    def _keep(self, real: Any, made: Any) -> Any:
        self._made[id(real)], self._of[id(made)] = made, real
        return made

    def _groups(self, real: Optimizer) -> list[dict[str, Any]]:
        groups = [self._keep(group, self._group(group, self._made)) for group in real.param_groups]
        return self._keep(real.param_groups, groups)

    def _group(self, group: dict[str, Any], by_identity: Mapping[int, Any]) -> dict[str, Any]:
        parameters = [by_identity.get(id(p), p) for p in group["params"]]
        forms = FORMS if any(isinstance(p, Spread) for p in parameters) else ()
        return {**group, "params": parameters, **{key: False for key in forms if key in group}}

    def _state(self, real: Optimizer) -> defaultdict[Any, Any]:
        made: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in real.state.items():
            take = self.plain.state_of(key) if isinstance(key, Tensor) else None
            taken = value if take is None else _mapped_tensors(take, value)
            made[self._made.get(id(key), key)] = taken
        return self._keep(real.state, made)

    def _mapped(
        self,
        value: Any,
        by_identity: Mapping[int, Any],
        optimizer: Callable[[Optimizer], Any] | None = None,
    ) -> Any:
        """Lists, tuples and dicts in which things stand for others; `value` if none does."""
        if id(value) in by_identity:
            return by_identity[id(value)]
        if isinstance(value, Optimizer) and optimizer is not None:
            return optimizer(value)
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value)
            new = {
                self._mapped(key, by_identity, optimizer): self._mapped(x, by_identity, optimizer)
                for key, x in items.items()
            }
            if all(k is j and x is y for (k, x), (j, y) in zip(new.items(), items.items())):  # noqa: B905 - equal lengths
                return items
            made = copy.copy(items)
            made.clear()
            made.update(new)
            return made
        if type(value) in (list, tuple):
            old = list(cast("list[Any]", value))
            parts = [self._mapped(x, by_identity, optimizer) for x in old]
            is_same = all(x is y for x, y in zip(parts, old, strict=True))
            return value if is_same else parts if type(value) is list else tuple(parts)
        return value

    def give_back(self) -> None:
        """Give the optimizers and their parameters what the step has left on the stand-ins."""
        self.plain.give_parameters()
        self.plain.give_gradients()
        for real, made in self._pairs:
            for group, left in zip(real.param_groups, made.param_groups, strict=True):
                kept = ("params", *FORMS)
                group.update({key: value for key, value in left.items() if key not in kept})
            self._give_state(real, made)
            if "step" in vars(real):  # wrapped by a scheduler of torch, to see that it was called
                vars(made)["_opt_called"] = True
            for name, value in vars(made).items():
                if name not in _OWN:
                    vars(real)[name] = self._mapped(value, self._of)

    def _give_state(self, real: Optimizer, made: Optimizer) -> None:
        state: dict[Any, Any] = {}
        for key, value in made.state.items():
            give = self.plain.stored_state_of(key) if isinstance(key, Tensor) else None
            given = value if give is None else _mapped_tensors(give, value)
            state[self._of.get(id(key), key)] = given
        real.state.clear()
        real.state.update(state)


def _mapped_tensors(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state with other tensors; most are dicts of tensors and numbers."""
    if type(state) is not dict:
        return pytree.tree_map_only(Tensor, function, state)
    items = cast("dict[Any, Any]", state)
    return {
        key: function(x)
        if isinstance(x, Tensor)
        else _mapped_tensors(function, x)
        if isinstance(x, dict | list | tuple)
        else x
        for key, x in items.items()
    }
