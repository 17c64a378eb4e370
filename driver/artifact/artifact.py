"""The file of a step that was compiled ahead: a zip archive of texts and tensors.

`manifest.json` has versions, mesh, options, guards and outputs; `program.mlir` and `plan.json` are
what other commands read; `constants.pt` has the tensors of the model's code. No code is loaded from
it: a rank emits Python from the program, as for any program, and audits it. The manifest names only
classes that the process has defined already. The program was verified when the file was made; a
digest shows that it has not changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from shardweave.__init__ import __version__
from shardweave.ir.mesh.mesh import Mesh

MANIFEST, PROGRAM, PLAN, CONSTANTS = "manifest.json", "program.mlir", "plan.json", "constants.pt"
"""The members of an artifact."""

ANEW = "make a new artifact (shardweave compile, sw.precompile)"


class ArtifactError(ValueError):
    """Raised if a file is no artifact, or was made with another version, mesh, model or setting."""


def versions() -> dict[str, str]:
    """Versions, by name, of the software on which a step's exact results depend."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {"shardweave": __version__, "torch": version("torch"), "python": python}


@dataclass(frozen=True, eq=False)
class Artifact:
    """A step that was compiled ahead. members: contents of each file in the archive, by name."""

    path: str
    manifest: Mapping[str, Any]
    members: Mapping[str, bytes]

    @property
    def mesh(self) -> Mesh:
        """The mesh whose ranks the step is for."""
        return Mesh.parse(self.manifest["mesh"])

    def __str__(self) -> str:
        return _digest(self.members)

    def text(self, name: str) -> str:
        return self.members[name].decode()

    @staticmethod
    def read(path: str | Path) -> Artifact:
        """Read a file. ArtifactError if it is damaged, or was made with other versions."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"artifact '{path}' cannot be read: {error.strerror}; give a file that `shardweave "
                "compile` or sw.precompile wrote."
            ) from error
        try:
            with ZipFile(BytesIO(content)) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
                is_whole = archive.comment.decode() == _digest(members)
            manifest = json.loads(members[MANIFEST]) if is_whole else {}
        except (BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError) as error:
            raise ArtifactError(f"'{path}' is not an artifact, or is damaged; {ANEW}.") from error
        if not is_whole:
            raise ArtifactError(f"artifact '{path}' is damaged, or was edited; {ANEW}.")
        made, here = manifest["versions"], versions()
        for name in [name for name in here if made[name] != here[name]]:
            raise ArtifactError(
                f"artifact '{path}' was made with {name} {made[name]}, but this process has "
                f"{name} {here[name]}; {ANEW} with the versions that run it."
            )
        return Artifact(str(path), manifest, members)

    def write(self) -> None:
        """Write the file atomically: completely or not at all."""
        members = {MANIFEST: json.dumps(self.manifest, indent=1).encode(), **self.members}
        partly = Path(f"{self.path}.{os.getpid()}.part")
        try:
            with ZipFile(partly, "w") as archive:
                for name, content in members.items():
                    archive.writestr(ZipInfo(name), content, ZIP_DEFLATED)
                archive.comment = _digest(members).encode()
            partly.replace(self.path)
        finally:
            partly.unlink(missing_ok=True)


def _digest(members: Mapping[str, bytes]) -> str:
    digests = [f"{name} {hashlib.sha256(members[name]).hexdigest()}" for name in sorted(members)]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
