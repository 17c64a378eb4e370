"""Training loops around models of several calls, parts, outputs and states."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.tests.driver.step.loops import (
    STEPS,
    Compile,
    Logits,
    Loop,
    Net,
    adam,
    batch,
    made,
)


@dataclass
class Output:
    """What a model returns, as a dataclass."""

    logits: Tensor
    features: Tensor


class InDataclass(nn.Module):
    """A model that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Output:
        return Output(*self.net(x))


class InDict(nn.Module):
    """A model that returns a dict, one entry in it a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> dict[str, object]:
        logits, features = self.net(x)
        return {"logits": logits, "hidden": [features, logits.exp()], "name": "net"}


class Autoencoder(nn.Module):
    """A variational autoencoder, whose noise comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


class Parts(nn.Module):
    """An encoder and a decoder that are called by themselves too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.decoder = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Recurrent(nn.Module):
    """A cell that takes and returns its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self.cell(x, x.new_zeros(len(x), 16) if hidden is None else hidden)
        return self.head(state), state


class Heads(nn.Module):
    """A trunk and heads, of which each call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 4)})

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        return self.heads[task](torch.tanh(self.trunk(x)))


class Deep(nn.Module):
    """Blocks, of which a flag of Python leaves some out; batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 16), nn.ModuleList()
        self.blocks.extend(nn.Linear(16, 16) for _ in range(3))
        self.norm, self.last = nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = x + torch.tanh(block(x))
        return self.last(x)


class Criterion(nn.Module):
    """A loss with weights of its own, of two tasks (homoscedastic uncertainty)."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))

    def forward(self, logits: Tensor, features: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([F.mse_loss(logits, y), features.square().mean()])
        return (losses * (-self.scales).exp() + self.scales).sum()


def distillation(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A student of a frozen teacher that stays plain."""
    teacher = made(lambda: Logits(8, 4), 5).eval().requires_grad_(False)
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2, dim=-1)
        logits = model(x)
        loss = F.kl_div(F.log_softmax(logits / 2, -1), wanted, reduction="batchmean")
        loss = 4 * loss + F.cross_entropy(logits, y.argmax(-1), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def truncated(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Truncated backpropagation through time, with a hidden state that is carried."""
    model = compiled(made(Recurrent), batch(0)[:1])
    optimizer, losses, hidden = adam(model), [], None
    for number in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        hidden = None if hidden is None else hidden.detach()
        for part in range(3):
            x, y = batch(10 * number + part)
            output, hidden = model(x, hidden)
            total = total + F.mse_loss(output, y)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, [model]


def mixup(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Mixup, and the plain batch by a second call."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(number))
        mixed = model(0.7 * x + 0.3 * x[order])
        loss = 0.7 * F.mse_loss(mixed, y) + 0.3 * F.mse_loss(mixed, y[order])
        loss = loss + F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def two_forwards(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """R-Drop: two forwards of one batch, kept together by a divergence."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        keep = (batch(40 + number)[0] > -1).double()
        first, second = model(x * keep).log_softmax(-1), model(x).log_softmax(-1)
        loss = F.nll_loss(first, y.argmax(-1)) + F.nll_loss(second, y.argmax(-1))
        loss = loss + F.kl_div(first, second, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def autoencoder(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A VAE: reconstruction and divergence of three outputs."""
    noise = torch.zeros(8, 4, dtype=torch.float64)
    model = compiled(made(Autoencoder), (batch(0)[0], noise))
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, noise = batch(number)
        output, mean, log_variance = model(x, noise)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        loss = F.mse_loss(output, x, reduction="sum") + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def actor_critic(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Soft actor-critic: two optimizers, a target that follows, critics frozen meanwhile."""
    actor = compiled(made(Logits), batch(0)[:1])
    critic = made(lambda: Logits(12, 1), 1)
    critic = compiled(critic, (torch.zeros(8, 12, dtype=torch.float64),))
    target = copy.deepcopy(critic).requires_grad_(False)
    for_actor, for_critic, losses = adam(actor), adam(critic), []
    for number in range(STEPS):
        state, reward = batch(number)
        after = batch(60 + number)[0]
        with torch.no_grad():
            value = target(torch.cat([after, torch.tanh(actor(after))], -1))
            goal = reward[:, :1] + 0.9 * value
        action = torch.tanh(actor(state))
        loss = F.mse_loss(critic(torch.cat([state, action.detach()], -1)), goal)
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        critic.requires_grad_(False)
        for_actor.zero_grad()
        of_actor = -critic(torch.cat([state, action], -1)).mean()
        of_actor.backward()
        for_actor.step()
        critic.requires_grad_(True)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        losses += [loss.item(), of_actor.item()]
    return losses, [actor, critic, target]


def heads(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Several tasks, one chosen in each step."""
    model = compiled(made(Heads), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, task="ab"[number % 2]), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def stochastic_depth(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Blocks left out by a flag, and evaluation in between with batch norm's statistics."""
    model = compiled(made(Deep), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        model.skipped = ((), (0,), (0, 2))[number % 3]
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        model.skipped = ()
        with torch.no_grad():
            losses.append(F.mse_loss(model(x), y).item())
        model.train()
    return losses, [model]


def in_dict(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Outputs in a dict, in a list in it."""
    model = compiled(made(InDict), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        output = model(x)
        assert output["name"] == "net"
        loss = F.mse_loss(output["logits"], y) + output["hidden"][0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def in_dataclass(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Outputs in a dataclass, and a criterion with parameters in the same optimizer."""
    model, criterion = compiled(made(InDataclass), batch(0)[:1]), made(Criterion)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], 0.05)
    losses = []
    for number in range(STEPS):
        x, y = batch(number)
        output = model(x)
        loss = criterion(output.logits, output.features, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model, criterion]


def parts(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A loss of two submodules that are called by themselves, and of the whole."""
    model = compiled(made(Parts), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        hidden = model.encoder(x)
        loss = F.mse_loss(model.decoder(hidden), y) + 0.1 * hidden.abs().mean()
        loss = loss + F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def reused(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """An output that goes into the next call, three times (weight sharing in depth)."""
    model = compiled(made(lambda: Logits(8, 8)), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        hidden = model(model(model(x)))
        loss = F.mse_loss(hidden[:, :4], y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def momentum_contrast(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """BYOL: an online model, a predictor, and a target that is a moving average."""
    model = compiled(made(Logits), batch(0)[:1])
    target = copy.deepcopy(model).requires_grad_(False)
    predictor = compiled(made(lambda: Logits(4, 4), 2), (batch(0, 4)[0],))
    optimizer = torch.optim.Adam([*model.parameters(), *predictor.parameters()], 0.05)
    losses = []
    for number in range(STEPS):
        x, noise = batch(number)[0], batch(90 + number)[0]
        online = F.normalize(predictor(model(x)), dim=-1)
        with torch.no_grad():
            wanted = F.normalize(target(x + 0.1 * noise), dim=-1)
        loss = (2 - 2 * (online * wanted).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        losses.append(loss.item())
    return losses, [model, predictor, target]


LOOPS: dict[str, Loop] = {
    "distillation": distillation,
    "truncated in time": truncated,
    "mixup": mixup,
    "two forwards": two_forwards,
    "autoencoder": autoencoder,
    "actor-critic": actor_critic,
    "heads": heads,
    "stochastic depth": stochastic_depth,
    "outputs in a dict": in_dict,
    "criterion with parameters": in_dataclass,
    "submodules": parts,
    "reused hidden states": reused,
    "momentum contrast": momentum_contrast,
}
