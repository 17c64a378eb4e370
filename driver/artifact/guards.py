"""Guards: what a step that was compiled ahead takes for granted of a model and a call, as text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from shardweave.backends.step.bound import device_of
from shardweave.backends.step.step_call import StepCall
from shardweave.backends.watch.agreement import (
    describe_model,
    gathered_from_ranks,
    without_addresses,
)
from shardweave.driver.artifact.artifact import Artifact, ArtifactError
from shardweave.driver.step.request import Request
from shardweave.driver.step.settings import ABSENT, Hooks, Settings
from shardweave.ir.capture.observed.loose_tensors import constants_of
from shardweave.ir.dialects.types import dtype_word, form_of

_PLACE = re.compile(r"(\w+ '[^']*'):? (.*)")
"""A line of a model's description: a module or tensor, and what it is."""

_OF_A_CALL = re.compile(r" in evaluation mode$| on the meta device$|, frozen")
"""Words of such a line that the call has too, or that make no other program."""


def guards_of(request: Request, call: StepCall) -> dict[str, str]:
    """The model, its settings, its code and the example's call, by words for each."""
    model = request.model
    lines = [_OF_A_CALL.sub("", line) for line in describe_model(model).splitlines()]
    places = [match.groups() for match in map(_PLACE.fullmatch, lines) if match]
    kept = {f"buffer '{name}'" for name in constants_of(model)}  # which a capture has added
    settings = Settings(model, request.loss).now().by_place()
    texts = ((f"setting '{place}'", _text(value)) for place, value in settings.items())
    return {
        **{f"{place} of the model": text for place, text in places if place not in kept},
        **{place: text for place, text in texts if text},
        **_code_of(model, request.loss),
        **_of_call(call, model),
    }


def check_guards(artifact: Artifact, request: Request, call: StepCall) -> None:
    """Raises ArtifactError, on every rank, where a guard differs on any. Collective."""
    made, here = artifact.manifest["guards"], guards_of(request, call)
    different = (name for name in {**made, **here} if made.get(name) != here.get(name))
    problems = [
        f"{name} is {here.get(name, 'absent')}, and was {made.get(name, 'absent')} when "
        f"'{artifact.path}' was made; bring it back, or make the artifact anew."
        for name in different
    ]
    everywhere = gathered_from_ranks(problems[:1]) if request.has_processes else [problems[:1]]
    for problem in chain.from_iterable(everywhere):
        raise ArtifactError(problem)


def _of_call(call: StepCall, model: nn.Module) -> dict[str, str]:
    """The parts of a call's key, and where the model is: one on the meta device is traced as on
    the CPU."""
    names = [name or "the model" for name, _ in model.named_modules()]
    trained = [name for name, _ in model.named_parameters()]
    evaluated = [name for name, mode in zip(names, call.modes, strict=True) if not mode]
    frozen = [name for name, wanted in zip(trained, call.trained, strict=True) if not wanted]
    inputs = {
        f"input '{name}' of the example": form_of(tensor)
        + (" with a gradient" if call.grad and tensor.requires_grad else "")
        for name, tensor in call.inputs.items()
    }
    device = device_of(model).type
    return {
        **inputs,
        "the form of the example's arguments": f"{call.form} {call.form.structure}".strip(),
        "the list of modules in evaluation mode": ", ".join(evaluated) or "empty",
        "the list of parameters without gradient": ", ".join(frozen) or "empty",
        "gradient mode": "on" if call.grad else "off",
        "autocast": dtype_word(call.autocast) if call.autocast else "off",
        "the device of the model": "cpu" if device == "meta" else device,
    }


def _text(value: Any) -> str:
    """A setting as text that is equal in another process; empty for one that cannot be."""
    if value is ABSENT:
        return "the class's"
    if isinstance(value, Hooks):
        return repr(value)
    if isinstance(value, torch.device):  # the model may be elsewhere
        return ""
    if isinstance(value, tuple) and value[:1] == ("object",):
        return "an object"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, FunctionType):
        return f"{value.__qualname__} of digest {_digest(value.__code__)}"
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    is_plain_object = type(value).__repr__ is object.__repr__
    return type(value).__qualname__ if is_plain_object else without_addresses(repr(value))


def _code_of(*objects: Any) -> dict[str, str]:
    """A digest of the functions of each class of modules, and of a loss that is a function."""
    modules = chain.from_iterable(o.modules() for o in objects if isinstance(o, nn.Module))
    classes = {kind for module in modules for kind in type(module).__mro__}
    own = [
        kind for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins")
    ]
    named = {f"the code of class '{kind.__qualname__}'": _digests(vars(kind)) for kind in own}
    functions = [o for o in objects if isinstance(o, FunctionType)]
    return named | {f"the code of '{f.__qualname__}'": _digest(f.__code__) for f in functions}


def _digests(members: Mapping[str, Any]) -> str:
    functions = [getattr(value, "__wrapped__", value) for value in members.values()]
    codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
    return hashlib.sha256("".join(map(_digest, codes)).encode()).hexdigest()[:12]


def _digest(code: CodeType) -> str:
    """A digest of what a function does, whatever lines it stands in."""
    constants = [_digest(c) if isinstance(c, CodeType) else _text(c) for c in code.co_consts]
    text = f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
