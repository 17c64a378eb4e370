"""Validation: what it runs, what it compares, what it says, and on what it refuses to run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

import shardweave as sw
from shardweave.backends.reference.reference import run_reference
from shardweave.driver.checking.sample import sample_values
from shardweave.driver.checking.validate import (
    TooLargeError,
    ValidationError,
    Validator,
    find_differences,
    in_float64,
)
from shardweave.driver.cli import main
from shardweave.driver.models.twin import twin_spec
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.program.program import Program
from shardweave.passes.kernels.unfuse_kernels import has_regions
from shardweave.passes.pipeline import PassPipeline, as_mesh
from shardweave.tests.compiled import compile_copy
from shardweave.tests.ir_text import step
from shardweave.tests.marks import slow, slow_where
from shardweave.tests.zoo import SPECS, captured

Captured = pytest.CaptureFixture[str]
GPT = "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4"

TEXT = """
    param %h.0.w : tensor<4x4xf32>
    input %x : tensor<8x4xf32>
    tangent %t : tensor<8x4xf32>
    %y = aten.mm(%x, %h.0.w) {layer = "h.0", phase = forward} : tensor<8x4xf32>
    %xt = aten.permute(%x, dims = [1, 0]) {layer = "h.0", phase = backward} : tensor<4x8xf32>
    %dw = aten.mm(%xt, %t) {layer = "h.0", phase = backward} : tensor<4x4xf32>
    output %y
    grad h.0.w = %dw
"""


@dataclass(frozen=True)
class ForgetTangentPass(ModulePass):
    """Takes the input for the tangent in the gradient's product."""

    name = "forget-tangent"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        (product,) = (o for o in Program(op).ops if o.results[0].name_hint == "dw")
        product.operands[1] = Program(op).arguments[1].value


def test_error_names_pass_value_layer_and_first_index() -> None:
    with pytest.raises(ValidationError) as error:
        PassPipeline([ForgetTangentPass()]).run(step(TEXT), observer=Validator())
    said = str(error.value)
    assert said.startswith(
        "pass 'forget-tangent' changed what the program computes: gradient 'h.0.w' of layer "
        "'h.0': [0, 0]: expected "
    )
    assert said.endswith("; 16 of 16 elements differ.")


def test_first_index_is_that_of_the_first_element_that_differs() -> None:
    program = step(TEXT)
    expected = run_reference(program, sample_values(program))
    found = {key: value.clone() for key, value in expected.items()}
    found["grad", "h.0.w"][2, 1] += 1
    found["grad", "h.0.w"][3, 0] = float("nan")
    (one,) = find_differences(program, expected, found)
    assert (one.index, one.num_different, one.size) == ((2, 1), 2, 16)
    assert one.actual == pytest.approx(one.expected + 1)


def test_rounding_is_no_difference_and_noise_in_a_zero_gradient_neither() -> None:
    program = step(TEXT)
    expected = {
        ("output", "0"): torch.ones(8, 4).double(),
        ("grad", "h.0.w"): torch.zeros(4, 4).double(),
    }
    found = {key: value * (1 + 1e-12) for key, value in expected.items()}
    assert find_differences(program, expected, found) == []
    assert find_differences(
        program, expected, {**found, ("output", "0"): found["output", "0"] + 1e-6}
    )
    assert find_differences(program, expected, {("output", "0"): found["output", "0"]})


def test_values_are_compared_by_kind_and_name_not_by_place() -> None:
    validator = Validator()
    sw.run_passes(step(TEXT), "cse,dce", validate=True)
    PassPipeline("cse,dce").run(step(TEXT), observer=validator)
    assert validator.num_values == 2


def test_program_that_a_pass_leaves_alone_is_not_run_again() -> None:
    validator = Validator()
    PassPipeline("dce,dce,cse").run(step(TEXT), observer=validator)
    assert validator.num_runs == 1


def test_program_above_the_limit_is_refused_with_the_option_to_give() -> None:
    with pytest.raises(
        TooLargeError, match=r"more than the limit of 10; .*--validate-limit 1e\+05"
    ):
        sw.run_passes(step(TEXT), "cse", validate=True, validate_limit=10)


def test_program_that_is_not_finite_is_refused() -> None:
    text = """
    input %x : tensor<4xf64>
    %a = aten.neg(%x) : tensor<4xf64>
    %b = aten.log(%a) : tensor<4xf64>
    output %b
    """
    with pytest.raises(ValueError, match=r"output '0' .* is infinite or NaN on random arguments"):
        sw.run_passes(step(text), "cse", validate=True)


def test_random_ops_are_refused() -> None:
    text = "input %x : tensor<4xf64>\n%a = aten.rand_like(%x) : tensor<4xf64>\noutput %a"
    with pytest.raises(ValueError, match=r"aten\.rand_like in layer '' draws random numbers"):
        sw.run_passes(step(text), "cse", validate=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_program_in_float64_computes_the_same_more_exactly(dtype: str) -> None:
    text = TEXT.replace("f32", {"bfloat16": "bf16", "float32": "f32"}[dtype])
    program = step(text)
    exact = in_float64(program)
    assert {dtype_of_value(r) for op in exact.ops for r in op.results} == {torch.float64}
    values = sample_values(exact)
    rounded = {key: v.to(getattr(torch, dtype)) for key, v in values.items()}
    wanted = run_reference(exact, {key: v.double() for key, v in rounded.items()})
    for key, value in run_reference(program, rounded).items():
        torch.testing.assert_close(value.double(), wanted[key], rtol=2e-2, atol=2e-2)


def test_casts_of_a_bfloat16_model_stay_casts() -> None:
    text = """
    input %x : tensor<4xbf16>
    %a = aten._to_copy(%x) : tensor<4xf32>
    %b = aten.sum.dim_IntList(%a, dim = [0], dtype = f32) : tensor<f32>
    output %b
    """
    exact = in_float64(step(text))
    assert "f32" not in str(exact)
    assert "dtype = f64" in str(exact)


@pytest.mark.parametrize("name", slow_where(lambda name: name not in ("gpt", "bert", "cnn"), SPECS))
def test_sampled_arguments_suit_every_model(name: str) -> None:
    program = captured(SPECS[name]).program
    values = sample_values(program)
    results = run_reference(program, values)
    assert all(value.isfinite().all() for value in results.values())
    largest = max(value.abs().max().item() for value in results.values())
    assert 1e-3 < largest < 1e9


def test_token_ids_labels_and_masks_are_in_their_ranges() -> None:
    values = sample_values(captured(SPECS["bert"]).program)
    ids, labels = values["input", "input_ids"], values["input", "labels"]
    mask = values["input", "attention_mask"]
    assert (ids.min(), ids.max()) == (0, 31)
    assert set(labels.unique().tolist()) <= {-100, *range(32)}
    assert (labels == -100).any()
    assert set(mask.unique().tolist()) == {0, 1}
    assert mask[:, 0].all()
    assert values["buffer", "bert.embeddings.position_ids"].max() < 16


def test_sampled_ids_of_a_cut_vocabulary_reach_all_of_it() -> None:
    local = sw.run_passes(
        captured(SPECS["gpt"]).program,
        "split-addmm,add-pending-sums,propagate-shardings,insert-collectives",
        mesh="tensor=2",
    )
    assert sample_values(local)["input", "input_ids"].max() > 16


def test_given_inputs_are_used() -> None:
    program = captured(SPECS["gpt"]).program
    given = torch.full((8, 16), 3)
    assert torch.equal(
        sample_values(program, inputs={"input_ids": given})["input", "input_ids"], given
    )


@pytest.mark.parametrize(
    ("spec", "parts", "twin"),
    [
        (
            "gpt:layers=96,hidden=12288,heads=96,vocab=51200,seq=2048,batch=1536",
            16,
            "gpt:layers=2,hidden=128,heads=16,vocab=32,seq=16,batch=16",
        ),
        (
            "gpt:layers=1,hidden=6,heads=3,ffn=9",
            2,
            "gpt:layers=1,hidden=2,heads=1,ffn=9,vocab=32,seq=16,batch=2",
        ),
    ],
)
def test_twin_is_small_and_divides_as_the_model_does(spec: str, parts: int, twin: str) -> None:
    assert twin_spec(spec, parts).split(":")[0] == twin.split(":")[0]
    assert set(twin_spec(spec, parts).split(":")[1].split(",")) == set(
        twin.split(":")[1].split(",")
    )


def test_model_without_sizes_has_no_twin() -> None:
    with pytest.raises(ValueError, match="has no sizes that validation could shrink"):
        twin_spec("package.module:factory", 2)


@pytest.mark.parametrize(
    "spec",
    [
        "gpt:layers=4,hidden=256,heads=8,vocab=512",
        slow(
            "hf:llama:num_hidden_layers=3,hidden_size=256,num_attention_heads=8,"
            "num_key_value_heads=4,intermediate_size=512,vocab_size=512,seq=32"
        ),
    ],
)
def test_run_validates_a_large_model_on_its_twin(spec: str, capsys: Captured) -> None:
    options = ["--mesh", "tensor=2", "--backend", "reference", "--validate"]
    assert main(["run", spec, *options, "--validate-limit", "3e8"]) == 0
    assert (
        "every pass was validated on a smaller model of the same structure"
        in capsys.readouterr().out
    )


def test_run_validates_a_small_model_itself(capsys: Captured) -> None:
    assert main(["run", GPT, "--mesh", "data=2", "--backend", "reference", "--validate"]) == 0
    assert "every pass was validated on this model" in capsys.readouterr().out


def test_opt_validates_every_pass(tmp_path: str, capsys: Captured) -> None:
    path = f"{tmp_path}/step.mlir"
    main(["capture", GPT, "-o", path])
    passes = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,cse"
    given = ["opt", path, "--mesh", "data=2", "--passes", passes, "-o", f"{tmp_path}/out.mlir"]
    capsys.readouterr()
    assert main([*given, "--validate"]) == 0
    assert "validated every pass: 21 values compared in " in capsys.readouterr().out
    assert main([*given, "--validate", "--validate-limit", "1e3"]) == 1
    assert "more than the limit of 1e+03" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "passes"),
    [
        ("data=1", "fuse-kernels"),
        ("data=1", "preset:kernels"),
        ("stage=2,data=1", "plan-megatron,preset:partition,cut-stages,fuse-kernels"),
    ],
)
def test_programs_with_fused_regions_are_validated(mesh: str, passes: str) -> None:
    validator = Validator()
    result = PassPipeline(passes).run(
        captured(SPECS["gpt"]).program, mesh=as_mesh(mesh), observer=validator
    )
    assert has_regions(result)
    assert validator.num_runs > 1


def test_compile_validates_with_the_inputs_it_is_given() -> None:
    example = captured(SPECS["gpt"]).example
    step = compile_copy(
        example.module,
        kwargs=example.kwargs,
        mesh="tensor=2",
        backend="reference",
        validate=True,
    )
    assert step(**example.kwargs).isfinite()
