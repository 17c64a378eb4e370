"""The model that a step was made of: what is done to it later reaches no step, and is answered.

A step has copies of the model's parameters and buffers, and modes of its own. A loop that goes on
with the model where it means the step does something else in silence. So what can be seen of that
is warned of, once for each model and kind, with what to write.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardweave.backends.step.accumulate import SAMPLE
from shardweave.backends.step.step import Step
from shardweave.backends.step.step_call import StepCall
from shardweave.ir.notes import warn
from shardweave.ir.torch_private import version_of

EARLY, EACH = 8, 16
"""Its parameters are looked at in so many first calls, and then in each sixteenth: nothing else in
a step touches them, so that a look takes 2% of a step of hidden 32, and what they show stays."""

LOOKS = 3
"""How often gradients are looked at, whether they were set to zero."""


_NUMBER = Counter[str]()
"""How many originals were made."""


class Original:
    """The model that a step was made of, and how it was then.

    It is looked at in each call of the step, when an optimizer takes a step, and when somebody asks
    the model for its state.
    """

    def __init__(self, model: nn.Module, step: Step) -> None:
        self.model = model
        self._step = ref(step)
        self._modules = list(model.modules())
        places: dict[int, tuple[dict[str, Any], str]] = {}
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), (module._parameters, name))
        self._places = list(places.values())
        """Of each parameter the first place, in the order of `model.parameters()`."""
        self._first = _versions(self.parameters())
        self._take()
        self._num_exchanges = step.num_exchanges
        self._is_trained_apart = False
        self._is_behind = False
        self._used: list[Tensor] = []
        """Parameters of the step whose gradients an optimizer has used since the last call."""
        self._num_looks = self._num_calls = 0
        for other in _ORIGINALS:
            if other.model is model:  # what was changed meanwhile was for this step
                other._take()
        _NUMBER["made"] += 1
        _ORIGINALS.add(self)
        _SAID.setdefault(model, set())
        _watch_optimizers()
        if not any(isinstance(hook, _Asked) for hook in model._state_dict_pre_hooks.values()):
            model.register_state_dict_pre_hook(_Asked())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: a copy of a step was made of the same model."""
        return self

    def _take(self) -> None:
        """Take the model as it is for known."""
        self._modes = tuple([module.training for module in self._modules])
        parameters = self.parameters()
        self._trained = _trained(parameters)
        self._versions = _versions(parameters)

    def parameters(self) -> list[Tensor]:
        """The model's, as they are now; those that are gone are left out."""
        found = [holder.get(name) for holder, name in self._places]
        return [parameter for parameter in found if parameter is not None]

    def _say(self, kind: str, text: str) -> None:
        said = _SAID[self.model]
        if kind not in said:
            said.add(kind)
            warn(text, UserWarning)

    # In each call of the step

    def check(self, call: StepCall) -> None:
        """Warn of what was changed on the model since the last look, where the step has it
        otherwise: a comparison of a few attributes of each module and, where it is due, parameter.
        """
        modes = tuple([module.training for module in self._modules])
        if modes != self._modes:
            self._check_modes(modes, call.modes)
            self._modes = modes
        is_due = self._num_calls < EARLY or not self._num_calls % EACH
        self._num_calls += 1
        if is_due:
            self._check_parameters(call)
        if not call.grad:
            self._check_others()
            return
        if self._used:
            self._check_zeroed()

    def _check_parameters(self, call: StepCall) -> None:
        """The part of `check` that looks at parameters."""
        parameters = self.parameters()
        trained = _trained(parameters)
        if trained != self._trained:
            self._check_trained(trained, call.trained)
            self._trained = trained
        versions = _versions(parameters)
        if versions != self._versions:
            changed = [new != old for new, old in zip(versions, self._versions, strict=False)]
            self._versions = versions
            self._check_values(parameters, changed)
        if call.grad and any([p._post_accumulate_grad_hooks for p in parameters]):
            self._check_hooks()

    def _check_modes(self, modes: tuple[bool, ...], wanted: tuple[bool, ...]) -> None:
        rows = zip(self._modules, modes, self._modes, wanted, strict=False)
        changed = next((m for m, new, old, own in rows if new not in (old, own)), None)
        if changed is None:
            return
        paths = {id(module): path for path, module in self.model.named_modules()}
        path = paths.get(id(changed), "")
        mode, method = ("training", "train()") if changed.training else ("evaluation", "eval()")
        self._say(
            "modes",
            f"{f'module {path!r} of ' if path else ''}the model was put in {mode} mode after "
            "sw.compile, which has no effect on the step: that has modes of its own. Write "
            f"step.{f'get_submodule({path!r}).' if path else ''}{method}",
        )

    def _check_trained(self, trained: tuple[bool, ...], wanted: tuple[bool, ...]) -> None:
        rows = zip(self.model.named_parameters(), trained, self._trained, wanted, strict=False)
        changed = [(name, new) for (name, _), new, old, own in rows if new not in (old, own)]
        if changed:
            name, new = changed[0]
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._say(
                "trained",
                f"requires_grad of '{name}'{more} of the model was set to {new} after sw.compile, "
                "which has no effect on the step: that has parameters of its own. Write "
                f"step.get_parameter({name!r}).requires_grad_({new})",
            )

    def _check_values(self, parameters: list[Tensor], changed: list[bool]) -> None:
        """Warn of new values, unless the model is trained itself, freed, or given the step's."""
        step = self._step()
        if step is None or step.num_exchanges != self._num_exchanges:
            self._num_exchanges = step.num_exchanges if step else 0
            return
        is_trained = self._is_trained_apart or any(p.grad is not None for p in parameters)
        own = compress(zip(parameters, step.gradients.parameters, strict=False), changed)
        if not is_trained and any(_differ(parameter, other) for parameter, other in own):
            self._say(
                "values",
                "parameters of the model were changed after sw.compile, which has no effect on the "
                "step: that has copies of them. If the step is to have these values, write "
                "step.load_state_dict(model.state_dict())",
            )

    def _check_hooks(self) -> None:
        """Warn of hooks after accumulation, unless the step's parameters have some too."""
        step = self._step()
        if step is None or not any(p._post_accumulate_grad_hooks for p in step.parameters()):
            self._say(
                "hooks",
                "a parameter of the model has a hook after the accumulation of its gradient, which "
                "the step does not call; register it on that of the step",
            )

    def _check_others(self) -> None:
        """Warn of a call without gradients of a step that others of the model have left behind."""
        step = self._step()
        if step is None or self._is_behind or step.num_exchanges:
            return
        if any(other._is_behind for other in _ORIGINALS if other.model is self.model):
            self._say(
                "others",
                "another step of the same model was trained, and this one has the values that the "
                "model had when it was compiled: each step has copies of its own. Call the trained "
                "step, in evaluation mode or under torch.no_grad(), or load its state_dict()",
            )

    def _check_zeroed(self) -> None:
        """Warn of gradients that an optimizer has used, to which this call would add. It is asked
        for a few times only: the answer of a GPU has to be waited for."""
        used, self._used = self._used, []
        self._num_looks += 1
        if self._num_looks <= LOOKS and any(map(_has_gradient, used)):
            self._say(
                "zeroed",
                "this call adds to gradients that an optimizer has used; write "
                "optimizer.zero_grad() or step.zero_grad() before it (that of the model that was "
                "compiled does not reach the step)",
            )

    # When an optimizer takes a step

    def is_of_model(self, parameters: set[int]) -> bool:
        """Whether some of the parameters, by id, are the model's."""
        return any(id(parameter) in parameters for parameter in self.parameters())

    def is_of_step(self, parameters: set[int]) -> bool:
        """Whether some are the step's."""
        step = self._step()
        return step is not None and any(id(p) in parameters for p in step.parameters())

    def check_optimizer(self) -> None:
        """Warn of an optimizer of the model's parameters, which nobody gives gradients."""
        if any(parameter.grad is not None for parameter in self.parameters()):
            self._is_trained_apart = True
        elif not self._is_trained_apart:
            self._say(
                "optimizer",
                "the optimizer has parameters of the model that was compiled, which have no "
                "gradients: the step has copies of its own, and these get them. Make the optimizer "
                "of step.parameters(), after sw.compile",
            )

    def fall_behind(self, parameters: set[int]) -> None:
        """Some of the step's parameters, by id, are trained; the model's stay as they were."""
        step = self._step()
        self._is_behind = True
        if step is not None and self._num_looks < LOOKS:
            self._used = [p for p in step.parameters() if id(p) in parameters]

    # When somebody asks for its state

    def check_asked(self) -> None:
        """Warn if the state is that of before the training."""
        if self._is_behind and _versions(self.parameters()) == self._first:
            self._say(
                "state",
                "the model's state_dict() has the values from before sw.compile; those that were "
                "trained are the step's: write step.full_state_dict(), or "
                "model.load_state_dict(step.full_state_dict()) first",
            )


_ORIGINALS: WeakSet[Original] = WeakSet()
_SAID: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The kinds of warnings that were given, by model."""


@dataclass(frozen=True)
class _Concerned:
    """Whose parameters an optimizer has, with how many of them, and how many originals there were,
    when that was found out."""

    size: tuple[int, int]
    parameters: set[int]
    models: WeakSet[Original]
    steps: WeakSet[Original]


_OPTIMIZERS: WeakKeyDictionary[Optimizer, _Concerned] = WeakKeyDictionary()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_on_optimizer_step)


def _on_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    found = _OPTIMIZERS.get(optimizer)
    size = sum(len(group["params"]) for group in optimizer.param_groups), _NUMBER["made"]
    if found is None or found.size != size:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = WeakSet(original for original in _ORIGINALS if original.is_of_model(own))
        steps = WeakSet(original for original in _ORIGINALS if original.is_of_step(own))
        found = _OPTIMIZERS[optimizer] = _Concerned(size, own, models, steps)
    for original in found.models:
        original.check_optimizer()
    for original in found.steps:
        original.fall_behind(found.parameters)


def _trained(parameters: list[Tensor]) -> tuple[bool, ...]:
    return tuple([parameter.requires_grad for parameter in parameters])


def _versions(parameters: list[Tensor]) -> list[tuple[int, int]]:
    """Which tensors they are, and how often each was written to."""
    return [(id(parameter), version_of(parameter)) for parameter in parameters]


def _differ(parameter: Tensor, own: Tensor) -> bool:
    """Whether the model's parameter differs from the step's, told by some values. Of shards it
    cannot be told, and then they may."""
    local = own.to_local() if isinstance(own, DTensor) else own
    if parameter.is_meta:
        return False
    if parameter.shape != local.shape:
        return True
    ours, theirs = (tensor.detach().flatten()[:SAMPLE] for tensor in (local, parameter))
    return not torch.equal(ours, theirs.to(ours))


def _has_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient other than zeros, told by some of its values."""
    gradient = parameter.grad
    if gradient is None:
        return False
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.flatten()[:SAMPLE].any())


class _Asked:
    """A hook before a model's state_dict. A copy or pickle of the model has one that does nothing,
    and needs no shardweave."""

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        del prefix, keep_vars
        for original in list(_ORIGINALS):
            if original.model is module:
                original.check_asked()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
