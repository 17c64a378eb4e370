"""Optimizers as users write them: on tensors, without a word of meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class Rule(Optimizer):
    """An optimizer whose step calls `update` for each parameter that has a gradient."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Rule):
    """Signs of a momentum."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        average = state["exp_avg"]
        p.data.mul_(1 - group["lr"] * 0.1)
        p.add_(average.clone().mul_(0.9).add(grad, alpha=0.1).sign_(), alpha=-group["lr"])
        average.mul_(0.99).add_(grad, alpha=0.01)


class Lamb(Rule):
    """Adam with a trust ratio of norms, by which Python decides."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, m=torch.zeros_like(p.data), v=torch.zeros_like(p.data))
        state["step"] += 1
        state["m"].mul_(0.9).add_(grad, alpha=0.1)
        state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        update = state["m"] / state["v"].sqrt().add(1e-6) + 0.1 * p.data
        weight, size = p.data.pow(2).sum().sqrt(), update.pow(2).sum().sqrt()
        ratio = 1.0 if weight == 0 or size == 0 else (weight / size).item()
        p.data.add_(update, alpha=-group["lr"] * ratio)


class Shampoo(Rule):
    """Preconditioners of each dim, whose roots are taken every second step."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["left"] = [torch.eye(n, dtype=p.dtype, device=p.device) * 1e-2 for n in p.shape]
            state["roots"] = [torch.eye(n, dtype=p.dtype, device=p.device) for n in p.shape]
        state["step"] += 1
        for dim, total in enumerate(state["left"]):
            rows = grad.transpose(0, dim).reshape(grad.shape[dim], -1)
            total.add_(rows @ rows.T)
            if state["step"] % 2 == 1:
                values, vectors = torch.linalg.eigh(total)
                power = values.clamp(min=1e-8).pow(-0.5 / p.ndim)
                state["roots"][dim] = vectors @ torch.diag(power) @ vectors.T
            grad = (
                (state["roots"][dim] @ grad.transpose(0, dim).reshape(grad.shape[dim], -1))
                .view(grad.transpose(0, dim).shape)
                .transpose(0, dim)
            )
        p.add_(grad, alpha=-group["lr"])


class Soap(Rule):
    """Adam in the basis of eigenvectors of a matrix's two products; plain Adam of vectors."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p), bases=[])
            if p.ndim == 2:
                state["bases"] = [
                    torch.linalg.qr(g @ g.T + torch.eye(len(g)).to(p))[0] for g in (grad, grad.T)
                ]
        state["step"] += 1
        bases = state["bases"]
        if bases:
            grad = bases[0].T @ grad @ bases[1]
        state["m"].lerp_(grad, 0.1)
        state["v"].mul_(0.95).addcmul_(grad, grad, value=0.05)
        update = state["m"] / (state["v"].sqrt() + 1e-8)
        if bases:
            update = bases[0] @ update @ bases[1].T
        p.sub_(group["lr"] * update)


class AdamMini(Rule):
    """One second moment for each row."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(m=torch.zeros_like(p), v=torch.zeros_like(p[..., :1] if p.ndim else p))
        state["m"].lerp_(grad, 0.1)
        state["v"].mul_(0.9).add_(grad.square().mean(-1, keepdim=True), alpha=0.1)
        p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-6), value=-group["lr"])


class EightBit(Rule):
    """A momentum in eight bits, with a scale for each row."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(
                codes=torch.zeros_like(p, dtype=torch.int8), scale=torch.zeros_like(p[..., :1])
            )
        average = (state["codes"] * state["scale"]).lerp_(grad, 0.1)
        state["scale"].copy_(average.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 127)
        state["codes"].copy_((average / state["scale"]).round_())
        p.sub_(average, alpha=group["lr"])


class BySize(Rule):
    """Signs, with a rate by the size of the parameter: elementwise but for a shape."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad.sign(), alpha=-group["lr"] * 8 / p.numel())


class SometimesNormed(Rule):
    """Elementwise, but for every second step, which divides by the gradient's norm."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(grad / grad.norm() if state["step"] % 2 == 0 else grad, alpha=group["lr"])


class ThroughViews(Rule):
    """Decides by values, and writes through views of parameters and around them."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        flat, rate = p.view(-1), group["lr"]
        if grad.abs().max().item() > 0 > grad.min().item():
            flat.sub_(grad.reshape(-1), alpha=rate)
        p.mul_(1 - 0.1 * rate)
        flat[1:3].add_(p.sum() * 1e-3)
        p.t().mul_(1 + rate * float(grad.var()))
        if p.ndim == 2:
            rows = state.setdefault("rows", torch.zeros(len(p), 1, dtype=p.dtype))
            rows.lerp_(grad.amax(1, keepdim=True), 0.1)
            p.sub_(rows * grad.mean(0), alpha=rate)
            p[0].add_(torch.dot(flat, grad.flatten()) * rate)
        p.data = p.data - rate * grad.sort(0).values.clamp(min=grad.norm(1).item() / p.numel())


class Projector:
    """The basis of a matrix's rows, made anew every second time, and how often it was asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.basis: Tensor | None = None

    def project(self, x: Tensor) -> Tensor:
        basis = self.basis
        if basis is None or self.count % 2 == 0:
            basis = torch.linalg.qr(x @ x.T + torch.eye(len(x)).to(x))[0]
        self.count, self.basis = self.count + 1, basis
        return basis.T @ x


Projector.__module__ = "someones_optimizers"  # objects of our own package are not searched


class InObjects(Rule):
    """A momentum, and objects that hold tensors, in the state and by the parameter's identity."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.sums: dict[int, Tensor] = {}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        total = self.sums[id(p)] = self.sums.get(id(p), torch.zeros_like(p)) + grad
        if p.ndim == 2:
            grad = state.setdefault("projector", Projector()).project(grad)
        p.sub_(grad + 0.1 * total, alpha=group["lr"])


class TurnsAndPicks(Rule):
    """Turns the gradient in place, and reads and writes where masks and ranks say."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mask = grad > grad.mean()
        grad[mask] = grad[mask] * 0.5
        grad[grad.abs() < 1e-3] = 0.0
        largest = torch.zeros_like(grad).scatter_(0, grad.abs().argsort(0), 1.0)
        largest.scatter_(0, grad.abs().argsort(0)[:1], 0.0)
        if p.ndim == 2:
            rows = grad.transpose_(0, 1).contiguous()
            grad.t_().mul_((rows @ rows.T).norm())
        p.sub_(grad * (0.5 + largest), alpha=group["lr"])


class AcrossParameters(Optimizer):
    """Signs, scaled by the norm of all gradients, and a count that the group keeps."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.norms: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = self.param_groups[0]
        group["k"] += 1
        grads = [p.grad for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        self.norms.append(norm)
        for p in group["params"]:
            p.sub_(p.grad.sign() * norm / group["k"], alpha=group["lr"])


class Noisy(Rule):
    """Adds noise of torch's generator."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(grad + torch.randn_like(p) * 0.01, alpha=group["lr"])


class Joint(Optimizer):
    """Momentum by joint ops, on `.data` that is set anew."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if "m" not in self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
            averages = [self.state[p]["m"] for p in params]
            torch._foreach_lerp_(averages, grads, 0.1)  # pyright: ignore[reportPrivateImportUsage]
            for p, average in zip(params, averages, strict=True):
                p.data = p.data - group["lr"] * average


class Lookahead(Optimizer):
    """Slow weights after every second step of an optimizer that it holds."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        self.base = Lamb(params, lr)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups
        self.slow: dict[Tensor, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.slow:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.slow = {p: p.detach().clone() for p in parameters}
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Wrapper(Optimizer):
    """Grows the steps of an optimizer that it holds, whose groups and state are its own."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        self.base = InObjects(params, lr)
        self.defaults = self.base.defaults
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        self.base.step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, old in zip(parameters, before, strict=True):
            p.add_(p - old, alpha=0.5)


class Averaging(Rule):
    """Takes the mean of gradients over processes, as if each had whole ones of its own rows."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        dist.all_reduce(grad)
        p.sub_(grad, alpha=group["lr"] / dist.get_world_size())


OWN = (
    Lion,
    Lamb,
    Shampoo,
    Soap,
    AdamMini,
    EightBit,
    BySize,
    SometimesNormed,
    ThroughViews,
    AcrossParameters,
    Noisy,
    Joint,
    Lookahead,
    InObjects,
    TurnsAndPicks,
    Wrapper,
)
