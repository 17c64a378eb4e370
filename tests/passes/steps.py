"""Local training steps for tests of schedules: two blocks written out, and random ones."""

from __future__ import annotations

from random import Random

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.dist import StartedOp, WaitOp
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.program.program import Program
from shardweave.tests.ir_text import step


def notes_of(layer: str, phase: str) -> str:
    return f'{{layer = "{layer}", phase = {phase}}}'


def in_sub_batches(text: str, mesh: str) -> Program:
    """A local program, in which `%name.1` is what sub-batch 1 has of a value."""
    program = step(text, mesh, local=True)
    for op in program.ops:
        _, dot, copy = (op.results[0].name_hint or "").partition(".")
        if dot:
            op.properties["copy"] = to_attribute([int(copy)])
    return program


def blocks(num_blocks: int = 2, num_copies: int = 2) -> Program:
    """A step of blocks that each end in an all-reduce, forward and backward, in sub-batches.

    Values are named by what they are, block and sub-batch: `%y0.1` is what block 0 gives for
    sub-batch 1, `%d0.1` the gradient of what it took. Block: mm a, tanh t, mm p, all-reduce y.
    Backward: mm dt, tanh_backward da, mm dw (for the weight), mm dp, all-reduce d.
    """
    copies = range(num_copies)
    text = [f"param %{name}{i} : @" for i in range(num_blocks) for name in "wv"]
    text += [f"input %yin.{c} : @" for c in copies]
    for i in range(num_blocks):
        for lines in zip(*(_forward(i, c) for c in copies), strict=True):
            text += lines
    for i in reversed(range(num_blocks)):
        for lines in zip(*(_backward(i, c, num_blocks) for c in copies), strict=True):
            text += lines
        text += _gradient(i, num_copies)
    text += [f"output out{c} = %y{num_blocks - 1}.{c}" for c in copies]
    text += [f"output in{c} = %d0.{c}" for c in copies]
    text += [f"grad w{i} = %g{i}" for i in range(num_blocks)]
    return in_sub_batches("\n".join(text).replace("@", "tensor<4x4xf64>"), "tensor=2")


def _taken(i: int, c: int) -> str:
    return f"%y{i - 1}.{c}" if i else f"%yin.{c}"


def _forward(i: int, c: int) -> list[str]:
    at, notes = f"{i}.{c}", notes_of(f"h.{i}", "forward")
    return [
        f"%a{at} = aten.mm({_taken(i, c)}, %w{i}) {notes} : @",
        f"%t{at} = aten.tanh(%a{at}) {notes} : @",
        f"%p{at} = aten.mm(%t{at}, %v{i}) {notes} : @",
        f'%y{at} = dist.all_reduce(%p{at}, axes = ["tensor"]) {notes} : @',
    ]


def _backward(i: int, c: int, num_blocks: int) -> list[str]:
    at, notes = f"{i}.{c}", notes_of(f"h.{i}", "backward")
    gradient = f"%d{i + 1}.{c}" if i + 1 < num_blocks else f"%yin.{c}"
    return [
        f"%dt{at} = aten.mm({gradient}, %v{i}) {notes} : @",
        f"%da{at} = aten.tanh_backward(%dt{at}, %t{at}) {notes} : @",
        f"%dw{at} = aten.mm({_taken(i, c)}, %da{at}) {notes} : @",
        f"%dp{at} = aten.mm(%da{at}, %w{i}) {notes} : @",
        f'%d{at} = dist.all_reduce(%dp{at}, axes = ["tensor"]) {notes} : @',
    ]


def _gradient(i: int, num_copies: int) -> list[str]:
    """The sum over sub-batches, which all of them share."""
    notes = notes_of(f"h.{i}", "backward")
    if num_copies == 1:
        return [f"%g{i} = aten.neg(%dw{i}.0) {notes} : @"]
    names = [f"%dw{i}.0", *(f"%s{i}.{c}" for c in range(1, num_copies - 1)), f"%g{i}"]
    return [
        f"{names[c]} = aten.add.Tensor({names[c - 1]}, %dw{i}.{c}) {notes} : @"
        for c in range(1, num_copies)
    ]


def order(program: Program) -> list[str]:
    """The ops in order by the names of their results; `start y0.0` and `wait y0.0` for messages.

    An op that recomputes has an R in front.
    """
    return [_name(op) for op in program.ops]


def _name(op: Operation) -> str:
    value: SSAValue = op.results[0]
    kind = ""
    if isinstance(op, StartedOp):
        kind = "start "
        value = next(iter(value.uses)).operation.results[0]
    elif isinstance(op, WaitOp):
        kind = "wait "
    recompute = "R" if "origin" in op.properties else ""
    return f"{kind}{recompute}{value.name_hint}"


def random_step(seed: int) -> Program:
    """A random step in random blocks and sub-batches, with collectives; not yet scheduled.

    Every op of a block is there for each sub-batch. Some ops join all sub-batches, as a batch
    norm does, some are shared by them, as what depends on weights only.
    """
    return _RandomStep(Random(seed)).program()


class _RandomStep:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.mesh = random.choice(["tensor=2", "data=2,tensor=2"])
        self.copies = random.choice([1, 2, 2, 3, 4])
        self.text = [f"param %w{i} : @" for i in range(3)]
        self.text += [f"input %x.{c} : @" for c in range(self.copies)]
        self.count = 0
        self.shared = [f"%w{i}" for i in range(3)]
        self.varying = ["%x"]
        """Values that each sub-batch has, without the sub-batch."""

    def program(self) -> Program:
        blocks = range(self.random.randint(1, 4))
        for block in blocks:
            self._ops(f"h.{block}", "forward", self.random.randint(2, 7))
        out = self.varying[-1]
        for block in reversed(blocks):
            self._ops(f"h.{block}", "backward", self.random.randint(2, 7))
            self._gradient(block)
        self.text += [f"output out{c} = {out}.{c}" for c in range(self.copies)]
        text = "\n".join(self.text).replace("@", "tensor<16x16xf32>")
        return in_sub_batches(text, self.mesh)

    def _ops(self, layer: str, phase: str, count: int) -> None:
        for _ in range(count):
            kind = self.random.random()
            if kind < 0.1:
                value = self._new()
                source = self.random.choice(self.shared)
                notes = notes_of(layer, phase)
                self.text.append(f"{value} = {self._call(source, source)} {notes} : @")
                self.shared.append(value)
            elif kind < 0.2:
                self._join(layer, phase)
            else:
                self._each(layer, phase)

    def _each(self, layer: str, phase: str) -> None:
        """One op for each sub-batch."""
        left = self.random.choice(self.varying[-6:])
        right = self.random.choice(self.varying[-6:] + self.shared[-3:])
        is_shared = right in self.shared
        value, form = self._new(), self._form()
        for c in range(self.copies):
            second = right if is_shared else f"{right}.{c}"
            call = form.format(f"{left}.{c}", second)
            self.text.append(f"{value}.{c} = {call} {notes_of(layer, phase)} : @")
        self.varying.append(value)

    def _join(self, layer: str, phase: str) -> None:
        """A sum over all sub-batches, which each of them reads."""
        source = self.random.choice(self.varying[-4:])
        self.shared.append(self._sum(source, notes_of(layer, phase)))

    def _gradient(self, block: int) -> None:
        notes = notes_of(f"h.{block}", "backward")
        total = self._sum(self.random.choice(self.varying[-4:]), notes)
        if "data" in self.mesh:
            value = self._new()
            self.text.append(f'{value} = dist.all_reduce({total}, axes = ["data"]) {notes} : @')
            total = value
        self.text.append(f"grad w{block} = {total}")

    def _sum(self, source: str, notes: str) -> str:
        total = f"{source}.0"
        for c in range(1, self.copies):
            value = self._new()
            self.text.append(f"{value} = aten.add.Tensor({total}, {source}.{c}) {notes} : @")
            total = value
        return total

    def _new(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def _form(self) -> str:
        axes = ["tensor"] if "data" not in self.mesh else ["tensor", "tensor", "data"]
        reduce = f'dist.all_reduce({{0}}, axes = ["{self.random.choice(axes)}"])'
        return self.random.choice(
            [
                reduce,
                reduce,
                "aten.mm({0}, {1})",
                "aten.mm({0}, {1})",
                "aten.tanh({0})",
                "aten.add.Tensor({0}, {1})",
            ]
        )

    def _call(self, left: str, right: str) -> str:
        return self._form().format(left, right)
