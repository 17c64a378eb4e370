"""Training loops written for plain PyTorch, with a place for the line that compiles a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 5

Compile = Callable[..., Any]
"""(model, example inputs, optimizers made before) -> the model that is trained."""

Loop = Callable[[Compile], tuple[list[float], list[nn.Module]]]
"""Trains for some steps; gives the losses, and the models with trained parameters."""


class Net(nn.Module):
    """A model that returns outputs and features, and no loss."""

    def __init__(self, inputs: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 16), nn.Linear(16, outputs)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.first(x))
        return self.second(features), features


class Logits(nn.Module):
    """A model that returns logits alone."""

    def __init__(self, inputs: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.net = Net(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x)[0], y)


class Penalised(nn.Module):
    """A critic's loss with a penalty on the gradient of its inputs, computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = self.net(x)[0].sum()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        return score / 8 + (gradient.norm(2, dim=1) - 1).square().mean()


def batch(number: int, columns: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same in each run."""
    made = torch.Generator().manual_seed(number)
    x = torch.randn(8, columns, dtype=torch.float64, generator=made)
    return x, torch.randn(8, 4, dtype=torch.float64, generator=made)


def made(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def adam(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def optimizer_first(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = made(WithLoss)
    optimizer, losses = adam(model), []
    model = compiled(model, batch(0), optimizers=optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def moving_average(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Logits), batch(0)[:1])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            losses.append(F.mse_loss(average(x), y).item())
    return losses, [model]


def scaler(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [model]


def lbfgs(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3), []
    for number in range(STEPS):
        x, y = batch(number)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())  # type: ignore[arg-type]
    return losses, [model]


def sharpness_aware(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        moved = []
        with torch.no_grad():
            for parameter in model.parameters():
                by = parameter.grad * (0.05 / (norm.item() + 1e-12))
                parameter.add_(by)
                moved.append(by)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.sub_(by)
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def adversarial(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    generator = compiled(made(lambda: Logits(4, 8)), (batch(0, 4)[0],))
    critic = compiled(made(lambda: Logits(8, 1), 1), batch(0)[:1])
    for_critic, for_generator, losses = adam(critic), adam(generator), []
    one, zero = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
    for number in range(STEPS):
        real, noise = batch(number)[0], batch(100 + number, 4)[0]
        for_critic.zero_grad()
        fake = generator(noise)
        loss = F.binary_cross_entropy_with_logits(critic(real), one)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zero)
        loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        F.binary_cross_entropy_with_logits(critic(fake), one).backward()
        for_generator.step()
        losses.append(loss.item())
    return losses, [generator, critic]


def proximal_policy(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Net), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x = batch(number)[0]
        with torch.no_grad():
            logits, _ = model(x)
            actions = logits.argmax(-1)
            before = logits.log_softmax(-1).gather(-1, actions[:, None])
        advantage = batch(50 + number)[1][:, :1]
        for _ in range(2):
            optimizer.zero_grad()
            logits, features = model(x)
            ratio = (logits.log_softmax(-1).gather(-1, actions[:, None]) - before).exp()
            policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = policy + 0.5 * (features.mean(-1, keepdim=True) - advantage).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def preferences(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = made(Logits)
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    model, optimizer, losses = compiled(model, batch(0)[:1]), None, []
    reference = compiled(reference, batch(0)[:1])
    optimizer = adam(model)
    for number in range(STEPS):
        chosen, rejected = batch(number)[0], batch(70 + number)[0]
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = reference(chosen).log_softmax(-1)[:, 0]
            other = reference(rejected).log_softmax(-1)[:, 0]
        ours = model(chosen).log_softmax(-1)[:, 0] - wanted
        theirs = model(rejected).log_softmax(-1)[:, 0] - other
        loss = -F.logsigmoid(2.0 * (ours - theirs)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def contrastive(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, noise = batch(number)[0], batch(90 + number)[0]
        optimizer.zero_grad()
        first, second = (F.normalize(model(v), dim=-1) for v in (x, x + 0.1 * noise))
        loss = F.cross_entropy(first @ second.T / 0.1, torch.arange(8))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def gradient_penalty(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Penalised), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(number)[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def unequal_accumulation(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        counts, total = (8, 4, 6), 0.0
        optimizer.zero_grad()
        for part, count in enumerate(counts):
            x, y = batch(10 * number + part)
            loss = F.mse_loss(model(x)[:count], y[:count], reduction="sum") / sum(counts)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, [model]


LOOPS: dict[str, Loop] = {
    "optimizer first": optimizer_first,
    "moving average": moving_average,
    "scaler": scaler,
    "LBFGS": lbfgs,
    "sharpness-aware": sharpness_aware,
    "adversarial": adversarial,
    "proximal policy": proximal_policy,
    "preferences": preferences,
    "contrastive": contrastive,
    "gradient penalty": gradient_penalty,
    "unequal accumulation": unequal_accumulation,
}
