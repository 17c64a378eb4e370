"""Running passes over a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, cast

from xdsl.context import Context
from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import ArgSpec, parse_pipeline
from xdsl.utils.exceptions import ArgSpecParseError, ParseError, PassFailedException

from shardweave.ir.context import make_context
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.suggest import did_you_mean
from shardweave.ir.text import without_gc
from shardweave.ir.verify import verify
from shardweave.passes.registry import PASSES, PLANNER_PREFIX
from shardweave.planners.registry import PLANNERS


class PassError(ValueError):
    """A pass failed; the message names it."""


def pass_class(name: str) -> type[ModulePass]:
    """The pass of a registered name. Raises ValueError with near names if there is none."""
    planner = name.removeprefix(PLANNER_PREFIX)
    if planner != name and planner in PLANNERS:
        made = import_module("shardweave.passes.planner_pass").planner_pass(planner)
        return cast("type[ModulePass]", made)
    target = PASSES.get(name)
    if target is None:
        known = sorted([*PASSES, *(PLANNER_PREFIX + one for one in PLANNERS)])
        raise ValueError(
            f"there is no pass '{name}'; {did_you_mean(name, known)}the passes are: "
            f"{', '.join(known)}."
        )
    module, _, attribute = target.partition(":")
    return cast("type[ModulePass]", getattr(import_module(module), attribute))


def parse_passes(spec: str) -> tuple[ModulePass, ...]:
    """Read `propagate-shardings,insert-collectives,...`; options stand in braces.

    Raises ValueError, in one line, for what does not parse, unknown passes and unknown options.
    """
    try:
        specs = list(parse_pipeline(spec))
    except (ParseError, ArgSpecParseError) as error:  # the latter is no Exception
        found = str(error).strip().splitlines()
        reason, place = found[-1].strip(), found[1].rpartition(":")[2]
        raise ValueError(
            f"the passes '{spec}' do not parse at column {place}: {reason}; write "
            "'pass,pass{option=value}'."
        ) from None
    return tuple(_made(one) for one in specs)


def _made(spec: ArgSpec) -> ModulePass:
    """The pass that a spec names, with its options."""
    kind = pass_class(spec.name)
    try:
        return kind.from_spec(spec)
    except (TypeError, AttributeError, ValueError) as error:
        options = ", ".join(f.name.replace("_", "-") for f in fields(cast("Any", kind)) if f.init)
        raise ValueError(
            f"pass '{spec.name}': {error}; its options are {options or 'none'}."
        ) from error


@dataclass(frozen=True, init=False)
class PassPipeline:
    """Passes in order. The program is verified after each."""

    passes: tuple[ModulePass, ...]

    def __init__(self, passes: str | Iterable[ModulePass | str]) -> None:
        if isinstance(passes, str):
            found = parse_passes(passes)
        else:
            nested = (parse_passes(p) if isinstance(p, str) else (p,) for p in passes)
            found = tuple(one for group in nested for one in group)
        object.__setattr__(self, "passes", found)

    def __str__(self) -> str:
        return ",".join(str(p.spec()) for p in self.passes)

    def run(self, program: Program, *, observer: Observer | None = None) -> Program:
        """Run the passes on a copy of the program and return it.

        Raises PassError, naming the pass, if one fails or leaves an invalid program.
        """
        result = program.clone()
        context = make_context()
        with without_gc():
            for one in self.passes:
                if observer is not None:
                    observer.before(one, result)
                _run_one(one, context, result)
                if observer is not None:
                    observer.after(one, result)
        return result


class Observer:
    """Sees the program before and after each pass; subclass what is needed."""

    def before(self, one: ModulePass, program: Program) -> None:
        """Called with the program that the pass is about to change."""

    def after(self, one: ModulePass, program: Program) -> None:
        """Called with the verified result of the pass."""


def _run_one(one: ModulePass, context: Context, program: Program) -> None:
    try:
        one.apply(context, program.module)
    except (ValueError, PassFailedException) as error:
        raise PassError(f"pass '{one.name}': {error}") from error
    problems = verify(program)
    if problems:
        raise PassError(f"pass '{one.name}' left an invalid program: {problems[0]}")


def run_passes(
    program: Program,
    passes: str | Iterable[ModulePass | str],
    *,
    mesh: Mesh | Mapping[str, int] | str | None = None,
) -> Program:
    """Run passes over a copy of a program, on `mesh` if one is given."""
    if mesh is not None:
        program = program.clone()
        program.set_mesh(as_mesh(mesh))
    return PassPipeline(passes).run(program)


def as_mesh(mesh: Mesh | Mapping[str, int] | str) -> Mesh:
    """A Mesh from one, from its text, or from axis sizes by name."""
    if isinstance(mesh, Mesh):
        return mesh
    return Mesh.parse(mesh) if isinstance(mesh, str) else Mesh(**mesh)
