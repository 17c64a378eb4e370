"""Random numbers that are equal on all ranks while an optimizer's step runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def shared_random_state(device: torch.device) -> Callable[[], None]:
    """Give every rank the generator state of rank 0. Collective. Returns a function to call after
    the step, which restores this rank's state if it differed."""
    cuda = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
    own = [torch.get_rng_state(), *([] if cuda is None else [torch.cuda.get_rng_state(cuda)])]

    def set_states(states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if cuda is not None:
            torch.cuda.set_rng_state(states[1], cuda)

    states = [state.to(device) for state in own]
    for state in states:
        dist.broadcast(state, src=0)
    first = [state.cpu() for state in states]
    set_states(first)
    if all(map(torch.equal, own, first)):
        return lambda: None
    return lambda: set_states(own)
