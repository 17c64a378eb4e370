"""The text of an op: `%y = aten.sum(%x, dim = [0]) {layer = "h.0"} : tensor<4xf32>`.

Operands and schema arguments stand in the parentheses, what a compiler added about the op in
the braces, and the types are those of the results: operand types follow from where the
operands are defined, so that a reader sees each type once.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Sequence
from typing import Self, cast

from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, StringAttr
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, MessageConstraint, OptPropertyDef, opt_prop_def
from xdsl.parser import Parser, UnresolvedOperand
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.dialects.annotations import ANNOTATIONS, annotation_problem
from shardweave.ir.dialects.attributes import PHASES, PhaseAttr, ShardingAttr
from shardweave.ir.dialects.literals import parse_literal, print_literal, to_attribute, to_python

STRUCTURE = "operand_structure"
"""Property of ops with absent or list operands: per argument 1, 0 (absent) or a list of these."""

Operands = Sequence[SSAValue | None | Sequence[SSAValue | None]]


def flatten(operands: Operands) -> tuple[list[SSAValue], Attribute | None]:
    """Flatten operands. Also returns the structure property: None if none is absent or in a
    list."""
    flat: list[SSAValue] = []
    structure: list[int | list[int]] = []
    for operand in operands:
        if isinstance(operand, SSAValue):
            flat.append(operand)
            structure.append(1)
        elif operand is None:
            structure.append(0)
        else:
            flat.extend(item for item in operand if item is not None)
            structure.append([int(item is not None) for item in operand])
    while structure and structure[-1] == 0:
        structure.pop()
    plain = all(item == 1 for item in structure)
    return flat, None if plain else to_attribute(structure)


class CallOpMeta(ABCMeta):
    """Metaclass that checks instances by class alone, which takes half of ABCMeta's time."""

    __instancecheck__ = type.__instancecheck__


class CallOp(Operation, metaclass=CallOpMeta):
    """Base of the ops whose text is a call: all ops of the dialects aten, dist and kernel."""

    @property
    def structured_operands(self) -> list[SSAValue | None | list[SSAValue | None]]:
        """Operands as the schema groups them: each a value, None, or a list of values and None."""
        structure = self.properties.get(STRUCTURE)
        if structure is None:
            return list(self.operands)
        flat = iter(self.operands)
        entries = cast("list[int | list[int]]", to_python(structure))
        return [
            [next(flat) if given else None for given in entry]
            if isinstance(entry, list)
            else (next(flat) if entry else None)
            for entry in entries
        ]

    def print(self, printer: Printer) -> None:
        named = [
            (name, value)
            for name, value in self.properties.items()
            if name not in ANNOTATIONS and name != STRUCTURE
        ]
        with printer.in_parens():
            printer.print_list(
                [*self.structured_operands, *named], lambda item: _print_argument(printer, item)
            )
        _print_annotations(printer, self)
        if self.results:
            printer.print_string(" : ")
            printer.print_list(self.result_types, printer.print_attribute)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands: list[SSAValue | None | list[SSAValue | None]] = []
        properties: dict[str, Attribute] = {}
        parser.parse_comma_separated_list(
            parser.Delimiter.PAREN, lambda: _parse_argument(parser, operands, properties)
        )
        flat, structure = flatten(operands)
        if structure is not None:
            properties[STRUCTURE] = structure
        if parser.parse_optional_punctuation("{") is not None:
            _parse_annotations(parser, properties)
        types: list[Attribute] = []
        if parser.parse_optional_punctuation(":") is not None:
            types = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        return cls.create(operands=flat, result_types=types, properties=properties)


class DefinedOp(CallOp, IRDLOperation):
    """An op that is defined in IRDL and whose text is a call; it may carry the annotations."""

    layer_attr = opt_prop_def(StringAttr, prop_name="layer")
    phase_attr = opt_prop_def(PhaseAttr, prop_name="phase")
    origin_attr = opt_prop_def(StringAttr, prop_name="origin")
    copy_attr = opt_prop_def(ArrayAttr[IntegerAttr], prop_name="copy")
    sharding_attr = opt_prop_def(ArrayAttr[ShardingAttr], prop_name="sharding")
    wanted_attr = opt_prop_def(ArrayAttr[ShardingAttr], prop_name="wanted")

    def verify(self, verify_nested_ops: bool = True) -> None:
        """Raises VerifyException, in one line that names the op and what it takes."""
        try:
            super().verify(verify_nested_ops)
            problem = annotation_problem(self)
        except VerifyException as error:
            problem = self._problem_of_arguments() or annotation_problem(self) or str(error)
        if problem is not None:
            raise VerifyException(f"{self.name}: {' '.join(problem.split())}")

    def _problem_of_arguments(self) -> str | None:
        """Explain how the arguments differ from the definition; None if they do not."""
        known = self.get_irdl_definition().properties
        # Those of a base come last in a definition.
        expected = {n: known[n] for n in reversed(known) if n not in ANNOTATIONS}
        absent = [name for name in expected if name not in self.properties]
        missing = [name for name in absent if not isinstance(expected[name], OptPropertyDef)]
        unknown = sorted(name for name in self.properties if name not in known)
        if missing or unknown:
            takes = ", ".join(expected) or "none"
            return f"missing {missing}, unknown {unknown}; it takes {takes}"
        for name, kind in expected.items():
            value = self.properties.get(name)
            if value is not None and not kind.constr.verifies(value):
                assert isinstance(kind.constr, MessageConstraint)
                return f"{name} must be {kind.constr.message}"
        return None


def _print_argument(
    printer: Printer, item: SSAValue | None | list[SSAValue | None] | tuple[str, Attribute]
) -> None:
    if item is None:
        printer.print_string("none")
    elif isinstance(item, list):
        with printer.in_square_brackets():
            printer.print_list(item, lambda operand: _print_argument(printer, operand))
    elif isinstance(item, tuple):
        printer.print_string(f"{item[0]} = ")
        print_literal(printer, item[1])
    else:
        printer.print_ssa_value(item)


def _print_annotations(printer: Printer, op: Operation) -> None:
    def print_annotation(name: str) -> None:
        value = op.properties[name]
        printer.print_string(f"{name} = ")
        if isinstance(value, PhaseAttr):
            printer.print_string(value.phase.data)
        else:
            printer.print_attribute(value)

    names = [name for name in ANNOTATIONS if name in op.properties]
    if names:
        printer.print_string(" ")
        with printer.in_braces():
            printer.print_list(names, print_annotation)


def _parse_operand(parser: Parser) -> SSAValue | None | list[SSAValue | None]:
    """An operand, `none`, or a list of these; raises a parse error on anything else."""
    items = parser.parse_optional_comma_separated_list(
        parser.Delimiter.SQUARE, lambda: _parse_item(parser)
    )
    return _parse_item(parser) if items is None else items


def _parse_item(parser: Parser) -> SSAValue | None:
    if parser.parse_optional_keyword("none") is not None:
        return None
    return _defined(parser, parser.parse_unresolved_operand("expected an operand"))


def _defined(parser: Parser, operand: UnresolvedOperand) -> SSAValue:
    name, index = operand.operand_name, operand.index
    values = parser.ssa_values.get(name, ())
    if index >= len(values):
        parser.raise_error(
            f"%{name} is used before it is defined; move its definition up", operand.span
        )
    return values[index]


def _parse_argument(
    parser: Parser,
    operands: list[SSAValue | None | list[SSAValue | None]],
    properties: dict[str, Attribute],
) -> None:
    name = parser.parse_optional_identifier() if not _at_none(parser) else None
    if name is None:
        if properties:
            parser.raise_error("operands come before named arguments")
        operands.append(_parse_operand(parser))
        return
    if name in ANNOTATIONS or name in properties or name == STRUCTURE:
        parser.raise_error(f"argument '{name}' cannot be given here or is given twice")
    parser.parse_punctuation("=")
    properties[name] = parse_literal(parser)


def _at_none(parser: Parser) -> bool:
    return parser._current_token.text == "none"  # pyright: ignore[reportPrivateUsage]


def _parse_annotations(parser: Parser, properties: dict[str, Attribute]) -> None:
    def entry() -> None:
        name = parser.parse_identifier("expected the name of an annotation")
        if name not in ANNOTATIONS or name in properties:
            parser.raise_error(
                f"'{name}' is not an annotation or is given twice; known: {', '.join(ANNOTATIONS)}"
            )
        parser.parse_punctuation("=")
        if name == "phase":
            phase = parser.parse_keyword_in(PHASES, " as the phase")
            properties[name] = PhaseAttr.of(phase)
        else:
            properties[name] = parser.parse_attribute()

    parser.parse_comma_separated_list(parser.Delimiter.NONE, entry)
    parser.parse_punctuation("}")
