"""Pipelines: passes that run over a program one after another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from xdsl.context import Context
from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import ArgSpec, parse_pipeline
from xdsl.utils.exceptions import ArgSpecParseError, ParseError, PassFailedException

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import is_staged
from shardweave.ir.program.text import make_context, without_gc
from shardweave.ir.suggest import did_you_mean
from shardweave.ir.verify.program import verify
from shardweave.passes.notes import heard_by, note, unheard
from shardweave.passes.observers import DumpFiles, Observer, Observers
from shardweave.passes.presets import preset_of, readable_spec
from shardweave.passes.program_pass import Analyses, PassWithAnalyses
from shardweave.passes.registry import find_pass

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshLike = Mesh | Mapping[str, int] | str
"""A mesh, axis sizes by name, or text such as "data=2,tensor=2"."""


class PassError(ValueError):
    """Raised if a pass fails; the message names it."""


def parse_passes(spec: str) -> tuple[ModulePass, ...]:
    """Parse a list of passes, `propagate-shardings,preset:oases,..`, with options in braces. Raises
    ValueError, in one line, for malformed text, unknown passes and unknown options."""
    if re.search(r"\d{19}", spec):
        raise ValueError("a number in the passes has over 18 digits, more than any option takes.")
    try:
        specs = list(parse_pipeline(readable_spec(spec)))
    except (ParseError, ArgSpecParseError) as error:  # the latter is no Exception
        lines = str(error).strip().splitlines()
        reason, place = lines[-1].strip(), lines[1].rpartition(":")[2]
        raise ValueError(
            f"the passes '{spec}' do not parse at column {place}: {reason}; write "
            "'pass,pass{option=value}'."
        ) from None
    return tuple(pass_ for entry in specs for pass_ in _made(entry))


def _made(spec: ArgSpec) -> tuple[ModulePass, ...]:
    """Create the pass that a spec names, with its options, or the passes of a preset."""
    preset = preset_of(spec.name)
    if preset is not None:
        if spec.parameters:
            raise ValueError(
                f"preset '{spec.name.removeprefix('preset-')}' has no options; write its passes "
                f"out and change them: {PassPipeline(preset)}"
            )
        return parse_passes(preset)
    kind = find_pass(spec.name)
    known = [f.name.replace("_", "-") for f in fields(cast("Any", kind)) if f.init]
    options = ", ".join(known)
    for option in spec.parameters:
        if option.replace("_", "-") not in known:
            raise ValueError(
                f"pass '{spec.name}' has no option '{option}'; {did_you_mean(option, known)}its "
                f"options are {options or 'none'}."
            )
    try:
        why = _wrong_kind(kind, spec)  # xDSL takes a truth value for a number
        if why:
            raise ValueError(why)
        return (kind.from_spec(spec),)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"pass '{spec.name}': {error}; its options are {options or 'none'}."
        ) from error


_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}


def _wrong_kind(kind: type[ModulePass], spec: ArgSpec) -> str:
    """Describe the first option whose value has the wrong type for the pass; empty if none."""
    hints = get_type_hints(kind)
    for option, values in spec.parameters.items():
        wanted = hints[option.replace("-", "_")]
        kinds = (int, float) if wanted is float else (wanted,)
        if wanted in _KINDS and (len(values) != 1 or type(values[0]) not in kinds):
            shown = ",".join(str(value) for value in values)
            return f"option '{option}' is '{shown}'; give {_KINDS[wanted]}"
    return ""


@dataclass(frozen=True, init=False)
class PassPipeline:
    """A sequence of passes. `str()` gives a text from which the same pipeline can be parsed."""

    passes: tuple[ModulePass, ...]

    def __init__(self, passes: str | Iterable[ModulePass | str]) -> None:
        if isinstance(passes, str):
            parsed = parse_passes(passes)
        elif not isinstance(passes, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"passes are a {type(passes).__name__}; give text such as 'cse,dce', or a list of "
                "passes."
            )
        else:
            nested = (parse_passes(p) if isinstance(p, str) else (p,) for p in passes)
            parsed = tuple(pass_ for group in nested for pass_ in group)
        object.__setattr__(self, "passes", parsed)

    def __str__(self) -> str:
        return ",".join(str(p.spec()) for p in self.passes)

    def until(self, name: str) -> PassPipeline:
        """The passes up to and including the first called `name`; ValueError if there is none."""
        names = [pass_.name for pass_ in self.passes]
        if name not in names:
            raise ValueError(
                f"pass '{name}' is not in the pipeline; it has {', '.join(names) or 'no passes'}."
            )
        return PassPipeline(self.passes[: names.index(name) + 1])

    def run(
        self,
        program: Program,
        *,
        mesh: Mesh | None = None,
        observer: Observer | None = None,
        verify_each: bool = True,
    ) -> Program:
        """Run the passes on a copy of the program, on `mesh` if one is given, and return it.

        verify_each: verify after each pass; otherwise once, at the end. Notes of passes become
        PassNote warnings, unless `notes.heard_by` redirects them.

        Raises PassError, naming the pass, if one fails or leaves an invalid program.
        """
        result = program.clone()
        if mesh is not None:
            result.set_mesh(mesh)
        context, analyses = make_context(), Analyses(result)
        watch = observer or Observer()
        with without_gc():
            for index, pass_ in enumerate(self.passes):
                watch.before(pass_, result)
                is_last = index + 1 == len(self.passes)
                notes: list[str] = []
                try:
                    with heard_by(notes.append):
                        _run_one(pass_, context, analyses)
                        if verify_each or is_last:
                            _check_after(pass_, analyses)
                    watch.after(pass_, result)
                except Exception as error:
                    watch.failed(pass_, error)
                    raise
                for text in notes:
                    note(f"{pass_.name}: {text}")
        return result

    def change(self, program: Program) -> None:
        """Run the passes on the program itself, without verification, observers and notes, as
        planners do to price programs. Raises PassError, naming the pass, if one fails."""
        context, analyses = make_context(), Analyses(program)
        with without_gc(), unheard():
            for pass_ in self.passes:
                _run_one(pass_, context, analyses)


def _run_one(pass_: ModulePass, context: Context, analyses: Analyses) -> None:
    """Run a pass on the program of `analyses`; drops them if the pass may have changed it."""
    program = analyses.program
    try:
        if isinstance(pass_, PassWithAnalyses) and not is_staged(program):
            pass_.rewrite(program, analyses)
        else:
            pass_.apply(context, program.module)
            analyses.forget()
    except (ValueError, PassFailedException) as error:
        raise PassError(f"pass '{pass_.name}': {error}") from error
    except Exception as error:
        error.add_note(f"in pass '{pass_.name}'")
        raise


def _check_after(pass_: ModulePass, analyses: Analyses) -> None:
    """Raise PassError for an invalid program; does not verify an unchanged program again."""
    problems = analyses.of(verify)
    if problems:
        raise PassError(f"pass '{pass_.name}' left an invalid program: {problems[0]}")


def run_passes(
    program: Program,
    passes: str | Iterable[ModulePass | str],
    *,
    mesh: MeshLike | None = None,
    dump_dir: str | Path | None = None,
    observer: Observer | None = None,
) -> Program:
    """Run passes over a copy of a program, on `mesh` if one is given. dump_dir: a folder for the
    program before the first pass and after each, as numbered files."""
    if dump_dir is not None:
        observer = Observers(filter(None, (DumpFiles(dump_dir), observer)))
    on = None if mesh is None else as_mesh(mesh)
    return PassPipeline(passes).run(program, mesh=on, observer=observer)


def as_mesh(mesh: MeshLike | DeviceMesh, num_devices: int | None = None) -> Mesh:
    """Convert a Mesh, text, axis sizes by name, or torch's DeviceMesh to a Mesh.

    num_devices: see `Mesh.parse`. Raises ValueError for anything else, and for a DeviceMesh whose
    dims have no names or whose ranks are not all ranks in order.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if hasattr(mesh, "mesh_dim_names"):  # torch.distributed takes long to import
        return _of_device_mesh(cast("DeviceMesh", mesh))
    if not isinstance(mesh, str | Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"mesh is a {type(mesh).__name__}, expected text such as 'data=2,tensor=4', a dict "
            "of sizes by axis name, an sw.Mesh or a DeviceMesh."
        )
    if not isinstance(mesh, str):
        mesh = ",".join(f"{name}={size}" for name, size in mesh.items())
    return Mesh.parse(mesh, num_devices)


def _of_device_mesh(mesh: DeviceMesh) -> Mesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            "the DeviceMesh has no names for its dims, which become mesh axes; make it with "
            "init_device_mesh(.., mesh_dim_names=('data', 'tensor'))."
        )
    ranks = cast("list[int]", mesh.mesh.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
    if ranks != list(range(len(ranks))):
        raise ValueError(
            f"the DeviceMesh has ranks {ranks}; give a DeviceMesh of all ranks in order, as "
            "init_device_mesh makes it."
        )
    return Mesh(**dict(zip(names, mesh.mesh.shape, strict=True)))
