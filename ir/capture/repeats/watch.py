# pyright: basic
# torch's tracing API is private and only partly typed.
"""Skip dynamo's run of a block whose code would do the same as an earlier, equal block's."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from shardweave.ir.capture.repeats.alike import Unlike
from shardweave.ir.capture.repeats.call import BlockCall, Unfit
from shardweave.ir.capture.repeats.record import TracedBlock
from shardweave.ir.torch_private import missing_for_copies, note_no_copies, original_of, replaced

logger = logging.getLogger(__name__)

_OF_MODEL = re.compile(r"L\['self'\](\.\w+|\[('[^']*'|\d+)\])*")
_CODE_OF_MODULES = frozenset(
    method.__code__ for method in vars(nn.Module).values() if hasattr(method, "__code__")
)
_MAX_RECORDS = 8


@dataclass
class Repeats:
    """Calls of blocks in a trace by dynamo.

    The first call of a block is traced as ever and recorded. When another block is called, dynamo
    has run all code up to that call, so all state that the block's code can see is known: its own
    state, the arguments, torch's modes, and objects from outside. If all of it equals the recorded
    block's state, up to renaming, the code does the same, and the recorded nodes are copied.

    paths: the blocks' paths by id. copied: paths of copied blocks. notes: why others were not.
    """

    paths: Mapping[int, str]
    copied: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _records: list[TracedBlock] = field(default_factory=list)
    _output: Any = None
    _recording: TracedBlock | None = None
    _checked: set[Any] = field(default_factory=set)
    """Sources (dynamo's names of objects) that are known not to lead to blocks."""

    _called: set[int] = field(default_factory=set)
    """Ids of the blocks that were called; a block may be called under several names."""

    _inner: set[int] = field(default_factory=set)
    """Ids of the blocks and of all modules within them."""

    def call(self, original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Trace a module's call; for a block equal to a recorded block, copy its nodes instead."""
        path = self.paths.get(id(variable.value))
        if path is None or self._recording is not None or not variable.source:
            return original(variable, tx, args, kwargs)
        if tx.output is not self._output:
            missing = missing_for_copies(tx)
            if missing:
                note_no_copies(missing)
                self.paths = {}
                return original(variable, tx, args, kwargs)
            self._output, self._records = tx.output, []
            self.copied, self.notes = [], []
            self._checked, self._called = set(), set()
        try:
            if id(variable.value) in self._called:
                raise Unfit("the block is called more than once")
            self._called.add(id(variable.value))
            self._check_outside(tx)
            call = BlockCall.of(variable, tx, args, kwargs)
        except Unfit as reason:
            self._say(path, reason)
            return original(variable, tx, args, kwargs)
        said: str | None = None
        for record in self._records:
            try:
                result = record.copy(call, path)
            except (Unfit, Unlike) as reason:
                said = f"unlike {record.path}: {reason}"
            else:
                self.copied.append(path)
                return result
        if said is not None:
            self._say(path, said)
        return self._record(original, call, path, args, kwargs)

    def _record(self, original: Any, call: BlockCall, path: str, args: Any, kwargs: Any) -> Any:
        record = TracedBlock(path, call, len(self._records))
        self._recording = record
        try:
            with record.watching():
                result = original(call.variable, call.tx, args, kwargs)
        finally:
            self._recording = None
        try:
            record.finish(result)
        except Unfit as reason:
            self._say(path, reason)
        else:
            if len(self._records) < _MAX_RECORDS:
                self._records.append(record)
        return result

    def _check_outside(self, tx: Any) -> None:
        """Raises Unfit if code has read an object that holds blocks, other than through the model.
        Dynamo notes each source once, so all sources read so far count."""
        for source in tx.output.root_tracer.traced_sources:
            if source in self._checked:
                continue
            name = source.name
            if not _OF_MODEL.fullmatch(name):
                try:
                    value = tx.output.resolve_source_value(source)
                except Exception as error:  # whatever reading an attribute may raise
                    raise Unfit(f"{name}, which the code reads, cannot be read again") from error
                if _leads_to_blocks(value, self._inner):
                    raise Unfit(f"code reads blocks by {name}, not as attributes of the model")
            self._checked.add(source)

    def _say(self, path: str, reason: Any) -> None:
        self.notes.append(f"{path}: {reason}")
        logger.info("block %s is traced on its own: %s", path, reason)

    def read(self, name: str, tx: Any) -> None:
        """Note an attribute that the recorded block reads. `__dict__` is not noted if nn.Module's
        own code reads it. tx: dynamo's translator of the function that reads."""
        if self._recording is not None and not (
            name == "__dict__" and tx.f_code in _CODE_OF_MODULES
        ):
            self._recording.words.add(name)


@contextlib.contextmanager
def repeats_of(blocks: Mapping[str, nn.Module]) -> Iterator[Repeats]:
    """Copy recorded calls of these blocks (by path) while dynamo traces in the context.

    With a torch that lacks the needed hooks (dynamo reports the attributes that code reads from
    torch 2.12 on), every block is traced, and a note says so.
    """
    missing = missing_for_copies() if blocks else ""
    if missing:
        note_no_copies(missing)
        yield Repeats({})
        return
    paths = {id(module): path for path, module in blocks.items()}
    inner = {id(module) for block in blocks.values() for module in block.modules()}
    repeats = Repeats(paths, _inner=inner)
    clean_export_root, call_function = original_of("export root"), original_of("module call")
    read_attribute = original_of("attribute read")

    def calling(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return repeats.call(call_function, self, tx, args, kwargs)

    def reading(self: Any, tx: Any, name: str) -> Any:
        repeats.read(name, tx)
        return read_attribute(self, tx, name)

    def cleaning(exported: fx.GraphModule) -> None:
        _merge_reads(exported.graph)
        clean_export_root(exported)

    with replaced({"export root": cleaning, "module call": calling, "attribute read": reading}):
        yield repeats


def _merge_reads(graph: fx.Graph) -> None:
    """Merge the nodes that read one parameter: dynamo does not reuse the nodes of copies."""
    first: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        if first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            graph.erase_node(node)


def _leads_to_blocks(value: Any, inner: set[int]) -> bool:
    """True if an object is or holds a block, a module within a block, or the id of one."""
    if isinstance(value, nn.Module):
        return any(id(module) in inner for module in value.modules())
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    else:
        return False
    return any(
        (isinstance(part, nn.Module) and id(part) in inner) or (type(part) is int and part in inner)
        for part in parts
    )
