"""The state of a step: copies of a model's parameters and buffers, under the model's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.programs import Key
from shardweave.backends.state.checkpoint import checkpointable
from shardweave.backends.step.backend import Backend
from shardweave.backends.step.stand_in import StandIn, mirrored, require_unchanged
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import broadcast_from_rank_0, require_same_values
from shardweave.ir.library.philox import STATE, random_state
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.torch_private import memory_key

_SAID_OTHERWISE = {
    "module": "a step wraps no module: it has the model's own names, parameters and state_dict",
    "set_requires_gradient_sync": "call the step under step.no_sync(), or with accumulate=",
    "clip_grad_norm_": "call torch.nn.utils.clip_grad_norm_(step.parameters(), ..)",
}
"""What stands for attributes that DistributedDataParallel or FSDP give a model."""


_COPY = (
    "Copy values into it (with torch.no_grad(): parameter.copy_(..), or step.load_state_dict); "
    "change modules on the model, and compile that anew."
)


class _Place(NamedTuple):
    """What a module holds: by its path, the dict and its key. memory: as `_memory_of`."""

    path: str
    held: dict[str, Any]
    name: str
    value: Any
    memory: int


def _memory_of(value: Any) -> int:
    """What stands for the memory of a DTensor, and is another once its `.data` is set; else 0."""
    return memory_key(value) if isinstance(value, DTensor) else 0


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers by kind and first name, in the order of its modules.

    Raises ValueError for one on the meta device.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        for kind, own in (("param", module._parameters), ("buffer", module._buffers)):
            for name, tensor in own.items():
                if tensor is None or id(tensor) in seen:
                    continue
                if tensor.is_meta:
                    raise ValueError(
                        f"{kind} '{dot}{name}' is on the meta device, without values to copy; "
                        "give the model its values (model.to_empty(device=..) and "
                        "load_state_dict) before compiling."
                    )
                seen.add(id(tensor))
                tensors[f"{kind} '{dot}{name}'"] = tensor
    return tensors


class Exchanges:
    """How often whole states were taken from a step, or given to it; its copies count with it."""

    def __init__(self) -> None:
        self.num = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class ShardedState(StandIn):
    """Copies of a model's parameters and buffers as a backend keeps them, and its modules' modes.

    On a mesh of several devices they are DTensors that hold this rank's shard, so that torch's
    optimizers, `clip_grad_norm_` and `torch.distributed.checkpoint` work on them; on one device
    they are plain tensors. Their values are those of rank 0's model.

    shardings: of parameters and buffers by kind and name; others are kept whole. sync: False sends
    no values, and raises AgreementError on every rank if they differ. Making it is collective.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        shardings: Mapping[Key, Sharding],
        *,
        sync: bool = True,
    ) -> None:
        super().__init__()
        self._backend = backend
        self._stored: dict[Key, Tensor] = {}
        self._shardings = dict(shardings)
        self._modes: list[nn.Module] = []
        self._exchanges = Exchanges()
        tensors = own_tensors(model)
        values = iter(tensors.values())
        if backend.is_joint and sync:
            values = broadcast_from_rank_0(list(tensors.values()), backend.device)
        elif backend.is_joint:
            require_same_values(tensors)
        self._mirror(model, values)
        self._keys = {id(tensor): key for key, tensor in self._stored.items()}
        self._places = self._places_now()

    def _places_now(self) -> list[_Place]:
        """Where modules hold the modules, parameters and buffers that programs work on."""
        return [
            _Place(f"{path}.{name}".lstrip("."), held, name, value, _memory_of(value))
            for path, module in self.named_modules()
            for held in (module._modules, module._parameters, module._buffers)
            for name, value in held.items()
            if value is not None
        ]

    def check_own(self) -> None:
        """Raises ValueError if something else was put in the place of a parameter, a buffer or a
        module: programs would go on with what was there."""
        for path, held, name, value, memory in self._places:
            if held.get(name) is not value:
                raise ValueError(
                    f"'{path}' of the step was replaced or deleted, but its programs work on what "
                    f"was there. {_COPY}"
                )
            if memory and _memory_of(value) != memory:
                raise ValueError(
                    f"the .data of '{path}' was set, which has no effect on the shards of a "
                    f"DTensor. {_COPY}"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        del recurse
        require_unchanged(self, fn)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _SAID_OTHERWISE and name not in self._modules:
            raise AttributeError(f"a step has no '{name}': {_SAID_OTHERWISE[name]}.")
        return super().__getattr__(name)

    def apply(self, fn: Callable[[nn.Module], None]) -> NoReturn:
        """Refused: `fn` would not find the layers that it looks for. Raises ValueError."""
        raise ValueError(
            "a step has the model's parameters, but none of its layers, for apply(); call it on "
            "the model before that is compiled, or change step.named_parameters() in place."
        )

    def share_memory(self) -> NoReturn:
        """Refused: processes train together as ranks of a mesh. Raises ValueError."""
        raise ValueError(
            "a step's tensors are of this process; processes that train together are ranks of its "
            "mesh, such as data=2."
        )

    def no_backward_hooks(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: backward runs in the step's own call. Raises ValueError."""
        raise ValueError(
            "a step runs backward in its call, so that such a hook would never be called; register "
            "a hook on tensors in the model's forward before it is compiled (y.register_hook)."
        )

    register_backward_hook = no_backward_hooks
    register_full_backward_hook = no_backward_hooks
    register_full_backward_pre_hook = no_backward_hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A step with parameters, gradients and buffers of its own, which runs the same programs.

        So `torch.optim.swa_utils.AveragedModel(step)` averages its weights.
        """
        new = super().__deepcopy__(memo)
        new._keys = {id(tensor): key for key, tensor in new._stored.items()}
        new._places = new._places_now()
        return new

    # Properties, since a layer of the model may have any of these names.

    @property
    def backend(self) -> Backend:
        """Where the tensors are."""
        return self._backend

    @property
    def stored(self) -> Mapping[Key, Tensor]:
        """Parameters and buffers by kind and first name."""
        return self._stored

    @property
    def shardings(self) -> Mapping[Key, Sharding]:
        """How they are sharded."""
        return self._shardings

    @property
    def modes(self) -> Sequence[nn.Module]:
        """The modules in the order of `model.modules()`, which have its modes at first."""
        return self._modes

    def _stand_for(self, model: nn.Module) -> None:
        """Read and set settings of the step's modules from now on on those of a model.

        It has the same modules, and lives as long as somebody else holds it.
        """
        for module, origin in zip(self._modes, model.modules(), strict=True):
            assert isinstance(module, StandIn)
            vars(module)["_origin"] = ref(origin)

    @property
    def num_exchanges(self) -> int:
        """How often states were taken from the step, or given to it, or to a copy of it."""
        return self._exchanges.num

    def _mirror(self, model: nn.Module, values: Iterator[Tensor]) -> None:
        """Take over the tree of a model's modules, whose shared ones and tied tensors stay such.

        values: of the tensors in the order of `own_tensors`.
        """
        kept: dict[int, Tensor] = {}
        made: dict[int, nn.Module] = {id(model): self}
        for path, module in model.named_modules():
            into: Any = made[id(module)]
            into.training = module.training
            self._modes.append(into)
            into._non_persistent_buffers_set |= module._non_persistent_buffers_set
            # Written to the dicts that nn.Module keeps: its setters refuse a name that a step
            # uses for something else, such as a layer called "program".
            for name, child in module._modules.items():
                if child is not None:
                    child = made.setdefault(id(child), mirrored(child))
                into._modules[name] = child
            dot = f"{path}." if path else ""
            for kind, old, new in (
                ("param", module._parameters, into._parameters),
                ("buffer", module._buffers, into._buffers),
            ):
                for name, tensor in old.items():
                    new[name] = None
                    if tensor is not None:
                        new[name] = self._kept((kind, dot + name), tensor, kept, values)

    def _kept(
        self, key: Key, tensor: Tensor, kept: dict[int, Tensor], values: Iterator[Tensor]
    ) -> Tensor:
        """The tensor that stands for one of the model's, of whose names this is the first."""
        if id(tensor) not in kept:
            sharding = self._shardings.setdefault(key, Sharding.replicated(tensor.ndim))
            made = self._backend.stored(next(values), sharding, key)
            if key[0] == "param":
                made = nn.Parameter(made, tensor.requires_grad)
            self._stored[key] = kept[id(tensor)] = made
        return kept[id(tensor)]

    def draw_from(self, seed: int) -> None:
        """Begin to draw random numbers: from now on there is a buffer `random_state`.

        Raises ValueError if the model has something else of that name.
        """
        if hasattr(self, STATE):
            raise ValueError(
                f"the model has a '{STATE}' of its own, where a step keeps the state of its random "
                "numbers; give it another name."
            )
        self._non_persistent_buffers_set.discard(STATE)
        state = random_state(seed)
        self._buffers[STATE] = self._kept(("buffer", STATE), state, {}, iter([state]))
        self._keys[id(self._buffers[STATE])] = ("buffer", STATE)
        self._places = self._places_now()

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Parameters and persistent buffers under the model's names, tied ones under each.

        They share memory with the step's own, and are DTensors on a mesh of several devices.
        """
        self._exchanges.num += 1
        return checkpointable(super().state_dict(*args, **kwargs))

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` with whole plain tensors on every rank, as the model's own. Collective."""
        if self._backend.is_joint:
            watchdog.meet("step.full_state_dict", "the state")
        self._exchanges.num += 1
        own = super().state_dict(keep_vars=True)
        return {name: self._whole(tensor, tensor) for name, tensor in own.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of all parameters, zeros without one, whole on every rank. Collective."""
        return {name: self._whole(self._gradient(p), p) for name, p in self.named_parameters()}

    def full_buffers(self) -> dict[str, Tensor]:
        """All buffers, whole on every rank. Collective."""
        return {name: self._whole(buffer, buffer) for name, buffer in self.named_buffers()}

    def _gradient(self, parameter: Tensor) -> Tensor:
        if parameter.grad is not None:
            return parameter.grad
        if id(parameter) not in self._keys:
            return torch.zeros_like(parameter)
        return self._backend.like(torch.zeros_like(self._backend.local(parameter)), parameter)

    def _whole(self, tensor: Tensor, stored: Tensor) -> Tensor:
        key = self._keys.get(id(stored))
        if key is None:  # registered on the step, whose programs do not know it
            return tensor.detach().clone()
        return self._backend.whole(tensor.detach(), self._shardings[key])

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy a state, of whole tensors or of DTensors, into the step's own. Collective.

        A state of random numbers is taken over even if no program has drawn any yet; that of a
        plain model has none, and leaves the step's own as they are.

        Raises ValueError for a tensor of another shape and, if `strict`, RuntimeError for
        missing and unknown names, as `nn.Module` does.
        """
        if assign:
            raise ValueError("load_state_dict: a step keeps its own tensors; leave assign out.")
        self._exchanges.num += 1
        if STATE in state_dict and ("buffer", STATE) not in self._stored:
            self.draw_from(0)
        own = super().state_dict(keep_vars=True)
        fitting = {
            name: self._fitted(name, value, own[name]) if name in own else value
            for name, value in state_dict.items()
        }
        if ("buffer", STATE) in self._stored:
            fitting.setdefault(STATE, own[STATE])
        return super().load_state_dict(fitting, strict=strict)

    def _fitted(self, name: str, value: Any, stored: Tensor) -> Any:
        """A given tensor in the form of the stored one."""
        key = self._keys.get(id(stored))
        if not isinstance(value, DTensor) and tuple(value.shape) != tuple(stored.shape):
            raise ValueError(
                f"load_state_dict: '{name}' has shape {tuple(value.shape)}, expected the global "
                f"shape {tuple(stored.shape)}."
            )
        return value if key is None else self._backend.fitted(value, stored, self._shardings[key])
