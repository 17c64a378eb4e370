"""Programs as Python modules: what the text says, and that it runs."""

from __future__ import annotations

import ast
import time
import traceback
from itertools import pairwise

import pytest
import torch

from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.emit.emit import emit, load_step
from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.annotations import set_layer
from shardweave.ir.program.program import Program
from shardweave.tests.backends.programs import mlp_program, one_op_program

TINY = {
    "gpt": "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=2",
    "cnn": "cnn:depth=10,channels=4,size=16,batch=2",
    "unet": "unet:channels=8,size=8,batch=2,levels=2,groups=4,heads=2",
}


def global_program(ops: str, result: str, type_: str) -> Program:
    """A program on one device with an input `%x: tensor<4x6xf64>`."""
    return Program.parse(f"""
builtin.module {{
  func.func @step(%x: tensor<4x6xf64> {{dist.kind = "input", dist.name = "x"}})
      -> ({type_} {{dist.kind = "output", dist.name = "0"}}) {{
    {ops}
    func.return {result} : {type_}
  }}
}}
""")


@pytest.mark.parametrize("name", TINY)
def test_emitted_module_computes_what_the_reference_does(name: str) -> None:
    example = build_example(TINY[name], dtype=torch.float64)
    program = capture(example.module, kwargs=example.kwargs)
    values = values_of(program, example.module, example.kwargs)
    wanted = run_reference(program, values)
    given = {**values, ("tangent", "loss"): torch.ones((), dtype=torch.float64)}
    found = load_step(emit(program))(Runtime(), given)
    assert list(found) == list(wanted)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor)


def test_statements_keep_names_layers_and_types() -> None:
    source = emit(mlp_program())
    assert '"""A training step, as it runs on every rank of mesh data=2,tensor=2.' in source
    assert (
        'up_weight = given["param", "up.weight"]  # float64[4, 4], '
        '#dist.sharding<[{"tensor"}, {}]>' in source
    )
    assert "    # up, forward\n    wt = torch.t(up_weight)" in source
    assert (
        '    y = rt.all_reduce(y_part, axes=("tensor",), in_place=True)  # float64[3, 4]\n'
        in source
    )
    assert (
        '    dw, db, dv = rt.all_reduce_coalesced([dw_part, db_part, dv_part], axes=("data",))'
        in source
    )
    assert '        ("grad", "down.weight"): dv,\n' in source


def test_values_are_deleted_after_their_last_use_but_not_arguments_and_results() -> None:
    lines = [line.strip() for line in emit(mlp_program()).splitlines()]
    after = {line.split(" = ")[0]: following for line, following in pairwise(lines)}
    assert after["h"] == "del wt"
    assert after["a"] == "del h"
    assert after["y"] == "del y_part"
    deleted = {word for line in lines if line.startswith("del ") for word in line[4:].split(", ")}
    assert not deleted & {"x", "up_weight", "tangent", "loss", "dw"}
    assert {"a", "dy", "yy", "dw_part"} <= deleted


def test_unread_results_are_freed_at_once() -> None:
    program = global_program(
        "%y, %mean, %rstd = aten.native_layer_norm(%x, eps = 1.0e-05)"
        " : tensor<4x6xf64>, tensor<4x1xf64>, tensor<4x1xf64>",
        "%y",
        "tensor<4x6xf64>",
    )
    assert "    del mean, rstd\n" in emit(program)


def test_literals_of_every_kind_are_python() -> None:
    program = global_program(
        "%full = aten.full(fill_value = -inf) : tensor<4x6xf32>\n"
        "%c = aten._to_copy(%full) : tensor<4x6xf64>\n"
        "%sum = aten.sum.dim_IntList(%c, dim = [0, 1], keepdim = true, dtype = f64)"
        " : tensor<1x1xf64>",
        "%sum",
        "tensor<1x1xf64>",
    )
    source = emit(program)
    assert "aten.full.default([4, 6], -inf, dtype=torch.float32, device=rt.device)" in source
    assert "aten._to_copy.default(full, dtype=torch.float64)" in source
    assert "torch.sum(c, [0, 1], True, dtype=torch.float64)" in source
    found = load_step(source)(Runtime(), {("input", "x"): torch.zeros(4, 6)})
    assert found["output", "0"].item() == -float("inf")


def test_names_that_python_keeps_or_that_collide_are_changed() -> None:
    program = global_program(
        "%rt = aten.neg(%x) : tensor<4x6xf64>\n"
        "%lambda = aten.neg(%rt) : tensor<4x6xf64>\n"
        "%a.b = aten.neg(%lambda) : tensor<4x6xf64>\n"
        "%a_b = aten.mul.Tensor(%a.b, %rt) : tensor<4x6xf64>\n"
        "%0 = aten.add.Tensor(%a_b, %a.b) : tensor<4x6xf64>",
        "%0",
        "tensor<4x6xf64>",
    )
    source = emit(program)
    ast.parse(source)
    assert "rt__2 = torch.neg(x)" in source
    assert "lambda_ = " in source
    assert "a_b__2 = torch.mul(a_b, rt__2)" in source
    x = torch.randn(4, 6, dtype=torch.float64)
    found = load_step(source)(Runtime(), {("input", "x"): x})
    torch.testing.assert_close(found["output", "0"], -x + x * x)


def test_lists_of_tensors_go_in_and_come_out() -> None:
    program = global_program(
        "%a, %b = aten.split.Tensor(%x, split_size = 2) : tensor<2x6xf64>, tensor<2x6xf64>\n"
        "%cat = aten.cat([%b, %a]) : tensor<4x6xf64>",
        "%cat",
        "tensor<4x6xf64>",
    )
    source = emit(program)
    assert "a, b = aten.split.Tensor(x, 2, 0)" in source
    assert "torch.cat([b, a], 0)" in source
    x = torch.randn(4, 6, dtype=torch.float64)
    found = load_step(source)(Runtime(), {("input", "x"): x})
    torch.testing.assert_close(found["output", "0"], x.roll(2, 0))


def test_operands_of_kernels_that_need_it_are_made_contiguous() -> None:
    program = one_op_program(
        "a=1",
        "aten.native_group_norm(%x, group = 2, eps = 1.0e-05)"
        " : tensor<2x4x3x3xf64>, tensor<2x2xf64>, tensor<2x2xf64>",
        (2, 4, 3, 3),
        "[{}, {}, {}, {}]",
        "[{}, {}, {}, {}]",
        "tensor<2x4x3x3xf64>",
        results="%y, %mean, %rstd",
    )
    source = emit(program)
    assert "torch.native_group_norm(x.contiguous(), None, None, 2, 4, 9, 2, 1e-05)" in source
    x = torch.randn(2, 3, 3, 4, dtype=torch.float64).permute(0, 3, 1, 2)
    wanted = torch.nn.functional.group_norm(x.contiguous(), 2)
    found = load_step(source)(Runtime(program.mesh), {("input", "x"): x})
    torch.testing.assert_close(found["output", "0"], wanted)
    torch.testing.assert_close(run_reference(program, {("input", "x"): x})["output", "0"], wanted)


def test_a_line_break_in_a_layer_or_an_argument_does_not_become_code() -> None:
    program = Program.parse("""
builtin.module {
  func.func @step(%x: tensor<2xf64> {dist.kind = "input", dist.name = "a\\"]\\n    oops()"})
      -> (tensor<2xf64> {dist.kind = "output", dist.name = "0"}) {
    %y = aten.neg(%x) {layer = "h\\n    oops()", phase = forward} : tensor<2xf64>
    func.return %y : tensor<2xf64>
  }
}
""")
    tree = ast.parse(emit(program))
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [ast.unparse(function) for function in called] == ["torch.neg"]


@pytest.mark.parametrize("name", ["a\0b", "\x1b[31m", "\ud800", "\N{BELL}", "\x7f"])
def test_a_character_that_python_refuses_in_a_name_is_written_as_an_escape(name: str) -> None:
    program = global_program("%y = aten.neg(%x) : tensor<4x6xf64>", "%y", "tensor<4x6xf64>")
    set_layer(next(iter(program.ops)), name)
    source = emit(program)
    assert "\0" not in source
    load_step(source)


def test_a_traceback_shows_the_emitted_line() -> None:
    program = global_program("%y = aten.neg(%x) : tensor<4x6xf64>", "%y", "tensor<4x6xf64>")
    step = load_step(emit(program))
    with pytest.raises(TypeError) as caught:
        step(Runtime(), {("input", "x"): "no tensor"})  # pyright: ignore[reportArgumentType]
    assert "y = torch.neg(x)" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_thirteen_thousand_ops_are_emitted_and_loaded_in_seconds() -> None:
    ops = ["%v0 = aten.neg(%x) : tensor<4x6xf64>"]
    ops += [f"%v{i} = aten.neg(%v{i - 1}) : tensor<4x6xf64>" for i in range(1, 13_000)]
    program = global_program("\n".join(ops), "%v12999", "tensor<4x6xf64>")
    start = time.process_time()
    step = load_step(emit(program))
    assert time.process_time() - start < 10
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(step(Runtime(), {("input", "x"): x})["output", "0"], x)


def test_pending_sums_are_added_to_terms_before_these_are_reduced() -> None:
    lines = [line.split("  #")[0].strip() for line in emit(mlp_program()).splitlines()]
    assert not any('"pending"' in line for line in lines)
    source = emit(mlp_program(), pending=["down.weight"])
    lines = [line.split("  #")[0].strip() for line in source.splitlines()]
    (add,) = [line for line in lines if '"pending"' in line]
    term = add.partition(" = ")[0]
    assert add.startswith(f'{term} = rt.added_product(given, ("pending", "down.weight"), ')
    reduce = next(i for i, line in enumerate(lines) if "rt.all_reduce" in line and term in line)
    assert lines.index(add) < reduce
    assert not any('"grad", "down.weight"), ' in line for line in lines)  # it is the whole sum
    load_step(source)
