"""Training loops with what stands around the step: schedules, groups, averages, saved states."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from shardweave.tests.driver.step.loops import (
    STEPS,
    Compile,
    Logits,
    Loop,
    adam,
    batch,
    made,
)
from shardweave.tests.driver.step.loops_models import Deep


def scheduled(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Warm-up and cosine in a chain, weight decay in groups by name."""
    model = compiled(made(Logits), batch(0)[:1])
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, 0.05), []
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
        ],
        milestones=[2],
    )
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, [model]


def freezing(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """The first layer frozen at first; its group is added with a rate of its own."""
    model = compiled(made(Logits), batch(0)[:1])
    model.net.first.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for number in range(STEPS):
        if number == 2:
            model.net.first.requires_grad_(True)
            optimizer.add_param_group({"params": model.net.first.parameters(), "lr": 0.05})
        if number == 4:
            model.net.second.bias.requires_grad_(False)
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def averaged(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Stochastic weight averaging, with SWALR and update_bn."""
    model = compiled(made(Deep), batch(0)[:1])
    average, optimizer, losses = AveragedModel(model), torch.optim.SGD(model.parameters(), 0.1), []
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if number > 1:
            average.update_parameters(model)
            schedule.step()
        losses.append(loss.item())
    update_bn([batch(number)[0] for number in range(3)], average)
    average.eval()
    with torch.no_grad():
        losses.append(average(batch(7)[0]).sum().item())
    return losses, [model]


def lookahead(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Slow weights that follow every second step."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if number % 2:
            with torch.no_grad():
                for held, parameter in zip(slow, model.parameters(), strict=True):
                    held += 0.5 * (parameter - held)
                    parameter.copy_(held)
        losses.append(loss.item())
    return losses, [model]


def validated(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Validation in the middle: no_grad, inference_mode, shorter batches, train and eval."""
    model = compiled(made(Deep), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        model.eval()
        with torch.inference_mode():
            losses.append(F.l1_loss(model(x[:6]), y[:6]).item())
        with torch.no_grad():
            losses.append(model(x).argmax(-1).eq(y.argmax(-1)).double().mean().item())
        model.train()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def saved(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Early stopping: the best state is kept, and loaded at the end, that of the optimizer too."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses, best, kept = adam(model), [], float("inf"), None
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if loss.item() < best:
            best = loss.item()
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        losses.append(loss.item())
    assert kept is not None
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    x, y = batch(9)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return losses, [model]


def in_memory(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """torch.save and torch.load of the states, to a buffer, after each step."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        state = torch.load(buffer)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses.append(loss.item())
    return losses, [model]


def tokens(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Accumulation by masked tokens, under autocast that is off, with the last micro-batch short."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = torch.optim.NAdam(model.parameters(), 0.05), []
    for number in range(STEPS):
        parts = [(*batch(10 * number + part), rows) for part, rows in enumerate((8, 8, 4))]
        total, optimizer_losses = sum(rows for *_, rows in parts), 0.0
        optimizer.zero_grad()
        for x, y, rows in parts:
            with torch.autocast("cpu", enabled=False):
                loss = F.mse_loss(model(x[:rows]), y[:rows], reduction="sum") / total
            loss.backward()
            optimizer_losses += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses += [optimizer_losses, float(norm)]
    return losses, [model]


def restarted(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """An optimizer made anew in the middle, weights set in place, gradients looked at."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        if number == 3:
            optimizer = torch.optim.RMSprop(model.parameters(), 0.01, momentum=0.9)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            nn.init.zeros_(model.net.second.bias)
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses += [loss.item(), sum(float(p.grad.square().sum()) for p in model.parameters())]
    return losses, [model]


def early_return(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Steps that are left out where a loss is too large, and a call without backward."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        if loss > 1.3:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, [model]


def pruned(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A mask on a weight after each step (pruning), and weights of norm one."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True), []
    mask = (model.net.first.weight.abs() > 0.1).double()
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.net.first.weight.mul_(mask)
            model.net.second.weight.div_(model.net.second.weight.norm().clamp(min=1.0))
        losses.append(loss.item())
    return losses, [model]


def compiled_by_hooks(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Forward hooks that keep features, of which the loss is made (perceptual loss)."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses, kept = adam(model), [], dict[str, Tensor]()
    model.register_forward_hook(lambda module, args, output: kept.update(output=output))
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        model(x)
        loss = F.huber_loss(kept["output"], y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


LOOPS: dict[str, Loop] = {
    "schedules": scheduled,
    "freezing": freezing,
    "weights averaged": averaged,
    "lookahead": lookahead,
    "validation": validated,
    "early stopping": saved,
    "saved in memory": in_memory,
    "masked tokens": tokens,
    "optimizer anew": restarted,
    "steps left out": early_return,
    "pruning": pruned,
    "forward hooks": compiled_by_hooks,
}
