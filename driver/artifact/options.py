"""Options of a step started from an artifact: those stored in it; others must not contradict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from shardweave.backends.registry import BACKENDS
from shardweave.backends.watch.agreement import digest_of
from shardweave.driver.artifact.artifact import ANEW, Artifact, ArtifactError
from shardweave.driver.step.request import DEFAULT_PLAN, CompileOptions
from shardweave.driver.step.request_text import option_text

Options = TypeVar("Options", bound=CompileOptions)

PLANNED: dict[str, Any] = {"plan": None, "cluster": None, "zero": 0, "sequence_parallel": False}
"""Options that only affect the plan, which an artifact contains; by name, their defaults."""

KEPT = (
    "backend", "passes", "loss", "only_loss", "precision", "backward", "batch", "outputs",
    "reduce_dtype",
)  # fmt: skip
"""Options stored in an artifact that also apply to programs compiled later for the step."""


def options_to_store(options: CompileOptions) -> dict[str, tuple[str, Any]]:
    """Options to store, by name: each as text, and its value if it is a str or int (else None)."""
    return {name: _stored(name, getattr(options, name)) for name in (*PLANNED, *KEPT)}


def _stored(name: str, value: Any) -> tuple[str, Any]:
    if name == "reduce_dtype" and value is not None:
        value = str(value).removeprefix("torch.")
    if name == "plan" and value is None:
        value = DEFAULT_PLAN
    text = option_text(name, value)
    if name == "plan" and "\n" in text:
        text = f"the one of digest {digest_of(text.encode())[:12]}"
    return text, value if isinstance(value, str | int) else None


def with_artifact(options: Options) -> Options:
    """Read the artifact that the options name, and fill in the options with which it was made.
    Raises ArtifactError for a given option that differs, and for a missing one that is required."""
    given = options.artifact
    artifact = given if isinstance(given, Artifact) else Artifact.read(str(given))
    taken: dict[str, Any] = {}
    empty = CompileOptions()
    for name, (text, value) in artifact.manifest["options"].items():
        own = getattr(options, name)
        own_text, _ = _stored(name, own)
        if name == "backend" and BACKENDS[own].passes == BACKENDS[value].passes:
            continue  # the same program runs on both
        if own_text == text or (name in PLANNED and own == PLANNED[name]):
            continue
        if own_text != _stored(name, getattr(empty, name))[0]:
            raise ArtifactError(
                f"{name}={_value_in(own_text, name)} is given, but artifact '{artifact.path}' "
                f"was made with {name}={_value_in(text, name)}; leave {name} out, or {ANEW}."
            )
        if value is None:
            raise ArtifactError(
                f"artifact '{artifact.path}' was made with {name}={_value_in(text, name)}; give "
                f"the same {name} here."
            )
        taken[name] = value
    return replace(options, **PLANNED, **taken, artifact=artifact)


def _value_in(text: str, name: str) -> str:
    value = text.removeprefix(f"{name}=")
    return value if len(value) < 80 else f"{value[:60]}.."
