# pyright: reportArgumentType=false
# Calls stand as users write them, whatever the stubs of torch say.
"""Cases of `models.py`: how models are put together, as PyTorch users write them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shardweave.benchmarks.cases_layers import F64, WIDTH
from shardweave.benchmarks.cases_layouts import layout_cases
from shardweave.benchmarks.cases_modules import Parts, linear, module_cases
from shardweave.benchmarks.models_measure import Example


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x).sum((0, 1))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@dataclass
class Output:
    """As models of Hugging Face return."""

    loss: Tensor
    logits: Tensor


Pair = namedtuple("Pair", ["loss", "logits"])


def _loss(h: Tensor) -> Tensor:
    return h.square().mean()


def _outputs() -> dict[str, Parts]:
    return {
        "returns-tuple": Parts(lambda m, h, i: (_loss(m.down(h)), h)),
        "returns-list": Parts(lambda m, h, i: [_loss(m.down(h)), h]),
        "returns-dict": Parts(lambda m, h, i: {"loss": _loss(m.down(h)), "logits": h}),
        "returns-dataclass": Parts(lambda m, h, i: Output(_loss(m.down(h)), h)),
        "returns-named-tuple": Parts(lambda m, h, i: Pair(_loss(m.down(h)), h)),
        "returns-sum-loss": Parts(lambda m, h, i: m.down(h).square().sum()),
        "two-losses": Parts(lambda m, h, i: _loss(m.down(h)) + 0.1 * h.abs().mean()),
        "loss-of-some-samples": Parts(lambda m, h, i: _loss(m.down(h[:4]))),
        "loss-times-count": Parts(lambda m, h, i: _loss(m.down(h)) / (i > 3).sum()),
        "masked-mean": Parts(
            lambda m, h, i: (m.down(h).square().mean(-1) * (i > 3)).sum() / (i > 3).sum()
        ),
        "weighted-by-batch-statistics": Parts(lambda m, h, i: h / h.std(0).detach()),
        "contrastive": Parts(_contrastive),
        "entropy-of-batch-mean": Parts(
            lambda m, h, i: torch.special.entr(m.down(h).softmax(-1).mean((0, 1))).sum()
        ),
        "max-over-batch": Parts(lambda m, h, i: h / h.abs().amax(0).detach()),
        "rank-in-batch": Parts(lambda m, h, i: h * h[:, 0, 0].argsort().argsort()[:, None, None]),
        "batch-shuffled": Parts(lambda m, h, i: h + h.flip(0)),
        "batch-rolled": Parts(lambda m, h, i: h + h.roll(1, 0)),
        "gram-over-batch": Parts(lambda m, h, i: torch.einsum("bsd,csd->bc", h, h).mean()),
    }


def _contrastive(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    z = F.normalize(m.down(h).mean(1), dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def _state() -> dict[str, Parts]:
    def ema(m: Any, h: Tensor, i: Tensor) -> Tensor:
        m.ema.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return h * m.ema

    def assigned(m: Any, h: Tensor, i: Tensor) -> Tensor:
        m.ema = 0.9 * m.ema + 0.1 * h.detach().mean((0, 1))
        return h * m.ema

    def counted(m: Any, h: Tensor, i: Tensor) -> Tensor:
        m.count += 1
        return h / m.count

    def queue(m: Any, h: Tensor, i: Tensor) -> Tensor:
        m.queue = torch.cat([m.queue[1:], h.detach().mean((0, 1))[None]])
        return h + m.queue.mean(0)

    def codebook(m: Any, h: Tensor, i: Tensor) -> Tensor:
        nearest = torch.cdist(h.flatten(0, 1), m.codes).argmin(-1)
        quantized = m.codes[nearest].view_as(h)
        hits = F.one_hot(nearest, 4).to(F64)
        m.codes.mul_(0.9).add_(0.1 * hits.T @ h.detach().flatten(0, 1) / 64)
        return h + (quantized - h).detach()

    def python_state(m: Any, h: Tensor, i: Tensor) -> Tensor:
        m.calls = getattr(m, "calls", 0) + 1
        return h * m.calls

    def noted(m: Any, h: Tensor, i: Tensor) -> Tensor:
        m.last = h.detach().mean()
        return h

    def buffers(**values: Tensor) -> Callable[[], dict[str, Tensor]]:
        return lambda: {name: value.clone() for name, value in values.items()}

    ones = torch.ones(WIDTH, dtype=F64)
    return {
        "buffer-in-place": Parts(ema, buffers=buffers(ema=ones)),
        "buffer-assigned": Parts(assigned, buffers=buffers(ema=ones)),
        "buffer-counted": Parts(counted, buffers=buffers(count=torch.zeros((), dtype=torch.long))),
        "buffer-queue": Parts(queue, buffers=buffers(queue=torch.randn(4, WIDTH, dtype=F64))),
        "buffer-codebook": Parts(codebook, buffers=buffers(codes=torch.randn(4, WIDTH, dtype=F64))),
        "buffer-read": Parts(lambda m, h, i: h * m.scale, buffers=buffers(scale=ones * 2)),
        "buffer-of-integers": Parts(
            lambda m, h, i: h[:, m.order], buffers=buffers(order=torch.randperm(8))
        ),
        "buffer-of-booleans": Parts(
            lambda m, h, i: h.masked_fill(m.mask, 0.0),
            buffers=buffers(mask=torch.arange(WIDTH) % 3 == 0),
        ),
        "buffer-complex": Parts(
            lambda m, h, i: torch.view_as_real(
                torch.view_as_complex(h.view(8, 8, 8, 2)) * m.turn
            ).flatten(2),
            buffers=lambda: {"turn": torch.exp(1j * torch.arange(8, dtype=F64))},
        ),
        "attribute-noted": Parts(noted, prepare=lambda m: setattr(m, "last", None)),
        "refused-python-state": Parts(python_state, prepare=lambda m: setattr(m, "calls", 0)),
    }  # fmt: skip


def _gradients() -> dict[str, Parts]:
    def hooked(m: Any, h: Tensor, i: Tensor) -> Tensor:
        h.register_hook(lambda grad: grad * 0.5)
        return h

    def on_parameter(m: Any) -> None:
        m.up.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def on_norm(m: Any) -> None:
        m.up.weight.register_hook(lambda grad: grad / (grad.norm() + 1))

    def on_module(m: Any) -> None:
        m.up.register_forward_hook(lambda module, args, output: output * 2)
        m.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def no_grad(m: Any, h: Tensor, i: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.down(h).softmax(-1)
        return h + target

    def frozen(m: Any) -> None:
        m.up.requires_grad_(False)
        m.embedding.requires_grad_(False)

    def grad_of_grad(m: Any, h: Tensor, i: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(m.down(h).sum(), h, create_graph=True)
        return h + slope

    def jvp(m: Any, h: Tensor, i: Tensor) -> Tensor:
        return torch.func.jvp(m.down, (h,), (h.cos(),))[1]

    return {
        "detach": Parts(lambda m, h, i: h + h.detach().cos()),
        "no-grad": Parts(no_grad),
        "hook-on-tensor": Parts(hooked),
        "hook-on-parameter": Parts(lambda m, h, i: h, prepare=on_parameter),
        "hook-by-norm": Parts(lambda m, h, i: h, prepare=on_norm),
        "hooks-of-modules": Parts(lambda m, h, i: h, prepare=on_module),
        "refused-backward-hook": Parts(
            lambda m, h, i: h,
            prepare=lambda m: m.up.register_full_backward_hook(lambda p, gi, go: None),
        ),
        "frozen": Parts(lambda m, h, i: h, prepare=frozen),
        "unused-parameters": Parts(lambda m, h, i: h, lambda: {"unused": linear()}),
        "autograd-function": Parts(lambda m, h, i: _Scaled.apply(h, m.b)),
        "straight-through": Parts(lambda m, h, i: _StraightThrough.apply(h * 3) + h),
        "straight-through-detach": Parts(lambda m, h, i: h + (h.sign() - h).detach()),
        "checkpoint": Parts(lambda m, h, i: checkpoint(m.inner, h, use_reentrant=False), _inner),
        "checkpoint-sequential": Parts(
            lambda m, h, i: checkpoint_sequential(m.inner, 2, h, use_reentrant=False), _inner
        ),
        "gradient-of-gradient": Parts(grad_of_grad),
        "functional-jvp": Parts(jvp),
        "functional-grad": Parts(
            lambda m, h, i: torch.func.grad(lambda z: m.down(z).square().sum())(h)
        ),
        "vmap": Parts(lambda m, h, i: torch.vmap(lambda row: m.down(row).cumsum(0))(h)),
        "functional-call": Parts(
            lambda m, h, i: torch.func.functional_call(
                m.down, {"weight": m.w * 2, "bias": m.b}, (h,)
            )
        ),
        "input-scaled-in-place": Parts(lambda m, h, i: h.mul_(2).add_(1)),
        "gradient-scaled": Parts(lambda m, h, i: 0.1 * h + 0.9 * h.detach()),
        "gradient-reversed": Parts(lambda m, h, i: 2 * h.detach() - h),
    }


def _inner() -> dict[str, Any]:
    return {"inner": nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh())}


def structure_cases() -> dict[str, Callable[[], Example]]:
    """All structures by name."""
    families = (module_cases, _outputs, _state, _gradients, layout_cases)
    return {name: parts.build for family in families for name, parts in family().items()}
