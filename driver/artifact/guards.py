"""Guards: properties of the model and the call that a precompiled step relies on, as text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.backends.step.bound import device_of
from shardweave.backends.step.step_call import StepCall
from shardweave.backends.watch.agreement import (
    describe_model,
    digest_of,
    gathered_from_ranks,
    tensor_digest,
    without_addresses,
)
from shardweave.driver.artifact.artifact import Artifact, ArtifactError
from shardweave.driver.step.request import Request
from shardweave.driver.step.settings import ABSENT, Hooks, Settings
from shardweave.ir.capture.observed.loose_tensors import constants_of
from shardweave.ir.dialects.types import dtype_word, form_of

_PLACE = re.compile(r"(\w+ '[^']*'):? (.*)")
"""Line of a model's description: a module or tensor, then its class, or shape and dtype."""

_OF_A_CALL = re.compile(r" in evaluation mode$| on the meta device$|, frozen")
"""Words of such a line to ignore: the call's guards cover them, or they change no program."""


def guards_of(request: Request, call: StepCall) -> dict[str, str]:
    """Texts of guards, by description: of the model, its settings, its code and the example
    call."""
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
    """Raise ArtifactError on every rank if a guard differs on any rank. Collective."""
    made, here = artifact.manifest["guards"], guards_of(request, call)
    different = (name for name in {**made, **here} if made.get(name) != here.get(name))
    problems = [
        f"{name} is {here.get(name, 'absent')}, and was {made.get(name, 'absent')} when "
        f"'{artifact.path}' was made; restore it, or make the artifact anew."
        for name in different
    ]
    everywhere = gathered_from_ranks(problems[:1]) if request.has_processes else [problems[:1]]
    for problem in chain.from_iterable(everywhere):
        raise ArtifactError(problem)


def _of_call(call: StepCall, model: nn.Module) -> dict[str, str]:
    """Guards of a call: its inputs, form and modes, and the model's device ("cpu" for a model on
    the meta device, which is traced as if on the CPU)."""
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
    """Format a setting as text that is equal in every process; empty if that is impossible."""
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
    """Digests of the methods of the modules' classes, of a loss function, and of the globals that
    these read: functions, numbers, strings and tensors. By description."""
    modules = chain.from_iterable(o.modules() for o in objects if isinstance(o, nn.Module))
    named: defaultdict[str, list[str]] = defaultdict(list)  # classes of one name may be several
    functions = [o for o in objects if isinstance(o, FunctionType)]
    seen = set(functions)
    for kind in {kind for module in modules for kind in type(module).__mro__}:
        if _is_own(kind):
            members = [getattr(value, "__wrapped__", value) for value in vars(kind).values()]
            own = [member for member in members if isinstance(member, FunctionType)]
            named[f"class '{kind.__qualname__}'"] += [_digest(member.__code__) for member in own]
            functions += own
    numbers: dict[str, str] = {}
    while functions:
        for name, value in _read_by(functions.pop()):
            if isinstance(value, FunctionType) and _is_own(value) and value not in seen:
                seen.add(value)
                functions.append(value)
            elif isinstance(value, bool | int | float | str | Tensor) and name[:2] != "__":
                numbers[f"the global '{name}'"] = _value_text(value)
    for function in seen:
        named[f"'{function.__qualname__}'"].append(_digest(function.__code__))
    codes = {f"the code of {name}": _short("".join(sorted(each))) for name, each in named.items()}
    return {**codes, **numbers}


def _value_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    dense = value.detach().to_dense() if value.layout != torch.strided else value
    return f"{form_of(value)} of digest {tensor_digest(dense)[:12]}"


def _is_own(value: Any) -> bool:
    """True if a class or function is not torch's: for those, torch's version is the guard."""
    return value.__module__.partition(".")[0] not in ("torch", "builtins")


def _read_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each global that a function reads, also attributes of modules."""
    names = set(_names_in(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] != "torch":
            yield from ((n, vars(value)[n]) for n in names & vars(value).keys())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _digest(code: CodeType) -> str:
    """Digest of a function's bytecode and constants; line numbers do not affect it."""
    constants = [_digest(c) if isinstance(c, CodeType) else _text(c) for c in code.co_consts]
    text = f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
    return _short(text)


def _short(text: str) -> str:
    return digest_of(text.encode())[:12]
