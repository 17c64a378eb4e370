"""Files of whole tensors: save_pretrained, and the states of optimizers."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

import shardweave as sw
from shardweave.backends.state.whole_state import whole_optimizer_states
from shardweave.tests.integrations.frameworks import check_same, example, is_first, weights
from shardweave.tests.spawn import run_ranks


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> float:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def saves_on_rank_0_and_trains_on(root: str) -> None:
    tiny = example("tiny")
    plain, model = tiny.model(), tiny.model()
    signature, text = inspect.signature(model.forward), repr(model)
    sw.compile(model, kwargs=tiny.batch(), mesh="data=2")
    assert (inspect.signature(model.forward), repr(model)) == (signature, text)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    losses: list[list[float]] = []
    for number in range(2):
        pairs = zip((plain, model), optimizers, strict=True)
        losses.append([step(*pair, tiny.batch()) for pair in pairs])
        if is_first() and number == 0:
            model.save_pretrained(root)
            saved = LlamaForCausalLM.from_pretrained(root)
            assert saved.config.architectures == ["LlamaForCausalLM"]
            check_same(weights(saved), weights(plain), "saved", 1e-4)
    for theirs, ours in losses:
        check_same(ours, theirs, "loss", 1e-5)


def test_save_pretrained_of_rank_0_alone_does_not_disturb_training(tmp_path: Path) -> None:
    run_ranks(saves_on_rank_0_and_trains_on, 2, str(tmp_path))


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def goes_on_from_whole_states() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    model = copy.deepcopy(plain)
    sw.compile(model, (x,), mesh="tensor=2")
    ours, theirs = fused(model), fused(plain)
    for number in range(4):
        for each, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
        if number == 1:
            with whole_optimizer_states([ours]):
                state = ours.state_dict()
            sent = [state if is_first() else None]
            dist.broadcast_object_list(sent)
            torch.save(state, io.BytesIO())
            ours = fused(model)
            ours.load_state_dict(sent[0])  # pyright: ignore[reportArgumentType]
    check_same(weights(model), weights(plain), "", 1e-9)


def test_fused_optimizer_goes_on_from_the_whole_state_that_was_saved() -> None:
    run_ranks(goes_on_from_whole_states, 2)
