"""Training loops that ask autograd for more than `loss.backward()`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardweave.tests.driver.step.loops import (
    STEPS,
    Compile,
    Logits,
    Loop,
    Net,
    Penalised,
    adam,
    batch,
    made,
)


def whole(tensor: Tensor) -> Tensor:
    """What a reader of a DTensor writes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wasserstein(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """WGAN-GP: the penalty differentiates the critic's gradient by its inputs."""
    generator = compiled(made(lambda: Logits(4, 8)), (batch(0, 4)[0],))
    critic = compiled(made(lambda: Logits(8, 1), 1), batch(0)[:1])
    for_critic, for_generator, losses = adam(critic), adam(generator), []
    for number in range(STEPS):
        real, noise = batch(number)[0], batch(100 + number, 4)[0]
        fake = generator(noise).detach()
        mix = (0.3 * real + 0.7 * fake).requires_grad_()
        score = critic(mix)
        (slope,) = torch.autograd.grad(score, mix, torch.ones_like(score), create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        for_generator.step()
        losses.append(loss.item())
    return losses, [generator, critic]


def meta_learning(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """MAML: an inner step by functional_call, and the outer gradient through it."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model, 0.01), []
    for number in range(STEPS):
        x, y = batch(number)
        parameters = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, parameters, (x,)), y)
        slopes = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        fast = {
            name: parameter - 0.1 * slope
            for (name, parameter), slope in zip(parameters.items(), slopes, strict=True)
        }
        optimizer.zero_grad()
        outer = F.mse_loss(functional_call(model, fast, (batch(50 + number)[0],)), y)
        outer.backward()
        optimizer.step()
        losses.append(outer.item())
    return losses, [model]


def gradient_of_gradients(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """The norm of the parameters' gradient as a part of the loss."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        loss = F.mse_loss(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total = loss + 0.1 * sum(whole(slope.square().sum()) for slope in slopes)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, [model]


def hessian_vector(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Hutchinson's estimate of the Hessian's diagonal, as AdaHessian takes it."""
    model = compiled(made(Logits), batch(0)[:1])
    losses = []
    for number in range(STEPS):
        x, y = batch(number)
        loss = F.mse_loss(model(x), y)
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [torch.ones_like(slope) for slope in slopes]
        bends = torch.autograd.grad(slopes, parameters, signs)
        with torch.no_grad():
            for parameter, slope, bend in zip(parameters, slopes, bends, strict=True):
                parameter.sub_(0.05 * slope / (bend.abs() + 1.0))
        losses.append(loss.item())
    return losses, [model]


def adversarial_inputs(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """FGSM: the gradient of the inputs, and a step on the perturbed ones."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
        optimizer.zero_grad()
        loss = F.mse_loss(model((x + 0.1 * slope.sign()).detach()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def learned_inputs(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A plain module in front of the compiled one, trained through it."""
    front = made(lambda: nn.Linear(8, 8), 3)
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = torch.optim.SGD([*front.parameters()], 0.1), []
    other = adam(model)
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        other.zero_grad()
        loss = F.mse_loss(model(front(x)), y)
        loss.backward()
        optimizer.step()
        other.step()
        losses.append(loss.item())
    return losses, [model, front]


def hooks(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Gradient hooks of parameters that scale, and an optimizer that steps in backward."""
    model = compiled(made(Logits), batch(0)[:1])
    parameters, losses = list(model.parameters()), []
    parameters[0].register_hook(lambda gradient: gradient * 0.5)
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in parameters}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(update)
    for number in range(STEPS):
        x, y = batch(number)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
    return losses, [model]


def output_hooks(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A hook on an output, and a retained gradient of it."""
    model = compiled(made(Net), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        logits, features = model(x)
        features.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        logits.retain_grad()
        optimizer.zero_grad()
        loss = F.mse_loss(logits, y) + features.square().mean()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), logits.grad.norm().item()]
    return losses, [model]


def checkpointed(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """torch.utils.checkpoint around the call."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        output = checkpoint(model, x, use_reentrant=False)
        assert isinstance(output, Tensor)
        loss = F.mse_loss(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def clipped_by_value(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """clip_grad_value_, and noise on gradients, the same on all ranks."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad += 0.01 * parameter.sign()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def weight_penalty(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A penalty on the weights beside the loss, as of L1 and elastic weight consolidation."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        penalty = sum((p - old[name]).square().sum() for name, p in model.named_parameters())
        loss = F.mse_loss(model(x), y) + 0.01 * sum(p.abs().sum() for p in model.parameters())
        loss = loss + 0.5 * penalty
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def retained(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Two backward passes through one call, and gradients of several losses compared (PCGrad)."""
    model = compiled(made(Net), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        logits, features = model(x)
        first, second = F.mse_loss(logits, y), features.square().mean()
        parameters = list(model.parameters())
        ours = torch.autograd.grad(first, parameters, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(second, parameters, allow_unused=True)
        optimizer.zero_grad()
        for parameter, left, right in zip(parameters, ours, theirs, strict=True):
            if right is None:
                parameter.grad = left
                continue
            dot = whole((left * right).sum())
            parameter.grad = left + right if dot.item() > 0 else left
        optimizer.step()
        losses += [first.item(), second.item()]
    return losses, [model]


def per_sample(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Gradients of single samples, clipped each (DP-SGD), one row a call."""
    model = compiled(made(Logits), (batch(0)[0][:2],))
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        sums, total = [torch.zeros_like(p) for p in model.parameters()], 0.0
        for row in range(0, 8, 2):
            loss = F.mse_loss(model(x[row : row + 2]), y[row : row + 2])
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            norm = whole(nn.utils.get_total_norm(slopes))
            for held, slope in zip(sums, slopes, strict=True):
                held += slope / max(1.0, norm.item() / 0.5)
            total += loss.item()
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient / 4
        optimizer.step()
        losses.append(total)
    return losses, [model]


def inner_penalty(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """A model whose forward differentiates, under a learning-rate schedule."""
    model = compiled(made(Penalised), batch(0)[:1])
    optimizer, losses = adam(model), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(number)[0])
        (2.0 * loss).backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, [model]


def jacobian(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """torch.autograd.functional.jacobian of the model, in the loss (contractive)."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        slope = torch.autograd.functional.jacobian(lambda v: model(v).sum(0), x, create_graph=True)
        loss = F.mse_loss(model(x), y) + 0.1 * slope.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


def transformed(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """torch.func.grad of a function that calls the model."""
    model = compiled(made(Logits), batch(0)[:1])
    losses = []
    for number in range(STEPS):
        x, y = batch(number)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(values: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.mse_loss(functional_call(model, values, (x,)), y)

        slopes, loss = torch.func.grad_and_value(loss_of)(parameters)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(0.1 * slopes[name])
        losses.append(loss.item())
    return losses, [model]


def in_place(compiled: Compile) -> tuple[list[float], list[nn.Module]]:
    """Outputs that plain tensors change in place, as label smoothing does, and that numpy reads."""
    model = compiled(made(Logits), batch(0)[:1])
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        x, y = batch(number)
        scores = 2 * model(x)
        scores.masked_fill_(y > 1, 0.5)
        scores *= y[:, :1]
        scores[y < -1] = 0.0
        loss = scores.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), float(scores.detach().numpy().std())]
    return losses, [model]


LOOPS: dict[str, Loop] = {
    "in place": in_place,
    "Wasserstein with penalty": wasserstein,
    "meta-learning": meta_learning,
    "gradient of gradients": gradient_of_gradients,
    "Hessian by vectors": hessian_vector,
    "adversarial inputs": adversarial_inputs,
    "learned inputs": learned_inputs,
    "gradient hooks": hooks,
    "output hooks": output_hooks,
    "checkpoint": checkpointed,
    "clip by value": clipped_by_value,
    "weight penalty": weight_penalty,
    "retained graph": retained,
    "clipped samples": per_sample,
    "inner penalty": inner_penalty,
    "Jacobian": jacobian,
    "torch.func": transformed,
}
