# pyright: basic
"""Explain errors of torch's tracing to the user: the line, the cause, and the remedy."""

from __future__ import annotations

import linecache
import os
import re
import traceback

import torch

from shardweave.ir.capture.observed.layouts import NESTED_REMEDY, SPARSE_REMEDY
from shardweave.ir.capture.observed.observe import Observation
from shardweave.ir.capture.site import (
    TORCH,
    CaptureError,
    Site,
    is_torchs_own,
    site_of_frames,
    site_of_node,
    users_line,
)

_RAISED = re.compile(r"raised exception (\w+)\((.*)\)$", re.MULTILINE)
_VALUE = re.compile(
    r"""ConstantVariable\(\w+: ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^()]*)\)""", re.DOTALL
)
_EAGER = re.compile(r"\): got (\w+)\((.*)\)$", re.MULTILINE)
_READER = re.compile(r"^Caused by: .*\((\S+\.py):(\d+) in \w+\)$", re.MULTILINE)
_WRONG_TYPE = re.compile(
    r"^TypeError when making fake.*?context: TypeError (?:<.*?>|\w+): (.*?)$",
    re.MULTILINE | re.DOTALL,
)

_MASKED = "keep all elements and mask them: torch.where(mask, x, 0) in place of x[mask]"
_TEXT = "compute nothing of a text that Python makes, such as that of an exception"
_REMEDIES = (
    ("sparse", SPARSE_REMEDY),
    ("nested", NESTED_REMEDY),
    ("linalg_lstsq", "write torch.linalg.pinv(A) @ B, whose shape does not depend on A's rank"),
    (
        "alias annotations",
        "let the op return a new tensor (y.clone()), and take the annotation out of its schema",
    ),
    ("no autograd formula", "give the op one: op.register_autograd(..), of ops that are traced"),
    (
        "support running with fake tensors",
        f"give the op a fake implementation; if it makes a nested tensor, {NESTED_REMEDY}",
    ),
    (
        "reconstruct",
        "return tensors, numbers and containers of them, not an object that forward makes",
    ),
    ("set_ on a graph input", "change the tensor by copy_(), not through .data"),
    ("requires_grad_()", "torch 2.12 and newer can trace it"),
    ("branch", "choose by torch.where, which computes both sides"),
    ("failed to bind arguments", "call it with the arguments that it takes, as in eager"),
    ("assert", "take the assertion out of forward"),
    ("operator `print`", "take it out of forward"),
    ("operator `str`", _TEXT),
    ("has no type", _TEXT),
    ("python_type()", _TEXT),
    ("nonzero", _MASKED),
    ("masked_select", _MASKED),
    ("modified by an inplace", "change a copy, or give a new tensor: eager refuses it too"),
    ("tolist", "keep the value a tensor"),
    (
        "pack_padded_sequence",
        "give the recurrent layer the padded batch, and take the last output of each row by its "
        "length: out[torch.arange(len(lengths)), lengths - 1]",
    ),
    ("checkpoint_sequential", "call checkpoint on each part"),
    ("duplicate tensor input", "give it a view of one of them (x.view_as(x))"),
    ("dynamic shape operator", "use one whose shapes do not depend on the data"),
    ("data dependent operator", "use one whose result stays a tensor"),
    ("module-level backwards hooks", "write it as a torch.autograd.Function in forward"),
    ("data-dependent", "keep the value a tensor, and sizes fixed"),
    ("nn.Parameter()", "make the parameter in __init__"),
    ("autograd", "compute this derivative in closed form, or in a step of its own"),
)
_ELSE = "make this part of the model traceable (no data-dependent shapes or branches)"

_ONLY_TRACED = (
    " (where eager does not, forward takes another way under torch.compiler.is_compiling(): pass "
    "the inputs that it then leaves out, such as attention_mask)"
)


def explained(
    error: Exception, observation: Observation, in_python: Exception | None = None
) -> CaptureError:
    """Make the CaptureError that replaces an error of torch. in_python: the error that the model
    raised when Python ran it on fake tensors; it gives the line if torch's error does not."""
    text = str(error)
    site = _site(error, observation.failed_in)
    later, number = _in_python(site, in_python)
    if not site.file:
        if number is not None:
            return number
        site = later
    raised = _RAISED.search(text)
    if raised is not None:
        message = _message_of(raised[2])
        is_ours = not site.file
        hint = _ONLY_TRACED if raised[1] in ("AttributeError", "TypeError") else ""
        return CaptureError(
            message if is_ours else f"{site}: forward raises {raised[1]}: {message}{hint}"
        )
    eager = _EAGER.search(text)
    if eager is not None:
        return CaptureError(f"{site}: {_unquoted(eager[2])}")
    wrong = _WRONG_TYPE.search(text)
    if wrong is not None:
        said = wrong[1].replace("immutable_dict", "dict").replace("immutable_list", "list")
        return CaptureError(f"{site}: forward raises TypeError: {said}")
    if "unbacked symbols" in text or "Size-like symbols: u" in text:
        return CaptureError(f"{site}: {_SHAPE}{_of_experts(site)}.")
    if "data-dependent expression" in text:
        return CaptureError(f"{site}: {_NUMBER}; {_number_remedy(error, site)}.")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = (lines or [type(error).__name__])[0].rstrip(".")
    reason = next((line for line in lines if line.startswith("Explanation:")), "")
    why = f" ({reason.removeprefix('Explanation: ').rstrip('.')})" if reason else ""
    lower = f"{first}{why}".lower()
    remedy = next((do for sign, do in _REMEDIES if sign.lower() in lower), _ELSE)
    if remedy == _ELSE and number is not None:
        return number
    if remedy == _ELSE and in_python is not None and str(in_python):
        site = later if later.file else site
        why += f", and run by Python: {' '.join(str(in_python).split())[:300]}"
    # torch's further sentences are hints for its own developers.
    said = first.partition(". ")[0]
    return CaptureError(f"{site}: torch could not trace the model: {said}{why}; {remedy}.")


def _in_python(site: Site, error: Exception | None) -> tuple[Site, CaptureError | None]:
    """Return the line at which Python failed, and a CaptureError if it read data as a number."""
    if error is None:
        return site, None
    frames = "".join(traceback.format_tb(error.__traceback__))
    later = Site(site.module, *(users_line(frames) or ("", 0)))
    if "_local_scalar_dense" not in str(error):
        return later, None
    return later, CaptureError(f"{later}: {_NUMBER}; {_number_remedy(error, later)}.")


def _of_experts(site: Site) -> str:
    """Return a remedy if the line looks like a loop over experts on their own rows; else ''."""
    line = f"{linecache.getline(site.file, site.line)} {site.module}"
    return _EXPERTS if _LOOP.search(line) else ""


def _number_remedy(error: Exception, site: Site) -> str:
    """Return the remedy for a number read out of a tensor, with torch's line if torch reads it."""
    frames = getattr(error, "real_stack", None) or ()
    places = [(frame.filename, frame.lineno or 0) for frame in frames][-1:]
    said = _READER.search(str(error))
    if said is not None:
        places.append((os.path.join(TORCH, said[1]), int(said[2])))
    readers = [place for place in places if is_torchs_own(place[0])]
    if not readers:
        return _of_experts(site).removeprefix("; ") or _KEPT
    file, line = readers[-1]
    if os.path.join("_numpy", "random") in file:
        return "draw by torch (torch.rand), or outside the model and pass what is drawn as an input"
    code = linecache.getline(file, line).strip()
    place = f"torch's {os.path.relpath(file, TORCH)}, line {line} (`{code}`)"
    return f"write out in the model what it computes, without that of {place}"


def check_data_dependence(graph: torch.fx.Graph) -> None:
    """Raises CaptureError, with the line, if a shape or Python number depends on the data."""
    for node in graph.nodes:
        if not node.meta.get("unbacked_bindings"):
            continue
        value = node.meta.get("example_value")
        is_number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        site = site_of_node(node)
        remedy = _of_experts(site)
        reason = f"{_NUMBER}{remedy or f'; {_KEPT}'}" if is_number else f"{_SHAPE}{remedy}"
        raise CaptureError(f"{site}: {reason}.")


_NUMBER = "a Python number is read out of a tensor, so that the program would depend on the data"
_KEPT = (
    "keep it a tensor (x.sum() in place of x.sum().item()); what is constant is to be an attribute "
    "of the module, but no buffer"
)
_SHAPE = (
    "the shape of this result depends on the data, and a program's shapes are fixed; keep all "
    "elements and mask them: torch.where(mask, x, 0) in place of x[mask], and sums over the mask "
    "in place of counts"
)
_LOOP = re.compile(r"expert|\bhit\b|\bwhere\(|\bnonzero\(", re.IGNORECASE)
_EXPERTS = (
    "; where experts compute the rows that chose them, loop over all experts, and let each compute "
    "all rows: out = out + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)"
)


def _site(error: Exception, module: str) -> Site:
    frames = getattr(error, "real_stack", None)
    if frames:
        return site_of_frames(module, frames)
    file, line = users_line(str(error)) or ("", 0)
    return Site(module, file, line)


def _message_of(arguments: str) -> str:
    """The message of an exception; before torch 2.12 arguments are a list of dynamo's objects."""
    values, number = _VALUE.subn(r"\1", arguments)
    if number or arguments == "[]":
        values = values[1:-1]
    return _VALUE.sub(r"\1", _unquoted(values))


def _unquoted(text: str) -> str:
    text = text.rstrip(",")
    is_quoted = len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]
    return text[1:-1].replace("\\'", "'") if is_quoted else text
