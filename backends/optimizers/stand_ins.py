"""Stand-ins for optimizers of DTensors: of the same class and state, on plain tensors."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.plain import PlainParameters
from shardweave.backends.optimizers.spread import Spread
from shardweave.ir.capture.update.held import mapped
from shardweave.ir.capture.update.reads import FORMS

_OWN = ("param_groups", "state", "step")


class StandIns:
    """Stand-ins, during one step, for an optimizer and for optimizers that it holds."""

    def __init__(self, optimizer: Optimizer, plain: PlainParameters) -> None:
        self.plain = plain
        self._made: dict[int, Any] = plain.made
        """Stand-ins by the id of the real object: tensors, groups, states, optimizers, others."""
        self._of: dict[int, Any] = plain.of
        self._pairs: list[tuple[Optimizer, Optimizer]] = []
        self._objects: list[tuple[Any, Any, Any]] = []
        """Objects that hold tensors, their stand-ins, and the state's key under which they are."""
        self.first = self._stand_in(optimizer)

    def _stand_in(self, real: Optimizer) -> Optimizer:
        made = object.__new__(type(real))
        self._keep(real, made)
        self._pairs.append((real, made))
        own = vars(real)
        for name, make in (("param_groups", self._groups), ("state", self._state)):
            if name in own:  # else it is that of an optimizer which this one holds
                is_known = id(own[name]) in self._made
                vars(made)[name] = self._made[id(own[name])] if is_known else make(own[name])
        for name, value in own.items():
            if name not in _OWN:
                vars(made)[name] = self._for(value)
        return made

    def _keep(self, real: Any, made: Any) -> Any:
        self._made[id(real)], self._of[id(made)] = made, real
        return made

    def _groups(self, real: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._keep(real, [self._keep(group, self._group(group)) for group in real])

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        parameters = [self._made.get(id(p), p) for p in group["params"]]
        forms = FORMS if any(isinstance(p, Spread) for p in parameters) else ()
        return {**group, "params": parameters, **{key: False for key in forms if key in group}}

    def _state(self, real: dict[Any, Any]) -> defaultdict[Any, Any]:
        made: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in real.items():
            made[self._made.get(id(key), key)] = self._for(value, key)
        return self._keep(real, made)

    def _for(self, value: Any, key: Any = None) -> Any:
        """Copy a value with stand-ins for real objects. key: its key in the state, if any."""
        take = self.plain.state_of(key) if isinstance(key, Tensor) else None

        def change(x: Any) -> Any:
            if take is not None and isinstance(x, Tensor):
                return take(x)
            if type(x) is int and x in self._made:  # as a key by which a tensor is known
                return id(self._made[x])
            if id(x) in self._made:
                return self._made[id(x)]
            return self._stand_in(x) if isinstance(x, Optimizer) else x

        copies: list[tuple[Any, Any]] = []
        made = mapped(value, change, copies)
        for old, new in copies:
            self._objects.append((old, self._keep(old, new), self._made.get(id(key), key)))
        return made

    def _real(self, made: Any, key: Any = None) -> Any:
        """Copy a value with real objects for stand-ins. key: its key in the state, if any."""
        give = self.plain.stored_state_of(key) if isinstance(key, Tensor) else None

        def change(x: Any) -> Any:
            if give is not None and isinstance(x, Tensor):
                return give(x)
            if type(x) is int and x in self._of:
                return id(self._of[x])
            return self._of.get(id(x), x)

        return mapped(made, change)

    def give_back(self) -> None:
        """Copy the results of the step from the stand-ins to the real optimizers and parameters."""
        self.plain.give_parameters()
        self.plain.give_gradients()
        for object_, made, key in self._objects:
            left = {name: self._real(value, key) for name, value in vars(made).items()}
            vars(object_).clear()
            vars(object_).update(left)
        for real, made in self._pairs:
            if "param_groups" in vars(real):
                for group, left in zip(real.param_groups, made.param_groups, strict=True):
                    kept = ("params", *FORMS)
                    group.update({key: value for key, value in left.items() if key not in kept})
            if "state" in vars(real):
                left = {
                    self._of.get(id(key), key): self._real(x, key) for key, x in made.state.items()
                }
                real.state.clear()
                real.state.update(left)
            if "step" in vars(real):  # wrapped by a scheduler of torch, to see that it was called
                vars(made)["_opt_called"] = True
            for name, value in vars(made).items():
                if name not in _OWN:
                    vars(real)[name] = self._real(value)
