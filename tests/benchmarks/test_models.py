"""Every model on every mesh equals eager: the acceptance test of the whole project."""

from __future__ import annotations

import pytest

from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import as_mesh, run_passes
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.replicated import plan_replicated
from shardweave.tests.marks import slow, slow_where
from shardweave.tests.zoo import (
    IMAGE_SPECS,
    SPECS,
    TEXT_SPECS,
    assert_equals_eager,
    captured,
    megatron,
    partitioned,
    random_plan,
)

MESHES = ("tensor=2", "data=2", "data=2,tensor=2", "tensor=4", "data=4,tensor=4", "data=8,tensor=8")
FAST_ON = {"data=4,tensor=4": ("gpt", "t5", "unet"), "data=8,tensor=8": ("gpt",)}
"""Models that are fast on the meshes of many ranks."""


def cases(names: dict[str, str], meshes: tuple[str, ...] = MESHES) -> list[object]:
    """Every model on every mesh; most of those on 16 and 64 ranks are slow."""
    return [
        pytest.param(
            name,
            mesh,
            id=f"{name}-{mesh}",
            marks=[] if name in FAST_ON.get(mesh, names) else [pytest.mark.slow],
        )
        for name in names
        for mesh in meshes
    ]


@pytest.mark.parametrize("name", SPECS)
def test_captured_program_equals_eager(name: str) -> None:
    case = captured(SPECS[name])
    assert_equals_eager(case.program, case)


@pytest.mark.parametrize(("name", "mesh"), cases(SPECS))
def test_model_sharded_by_the_megatron_rule_equals_eager(name: str, mesh: str) -> None:
    plan = megatron(SPECS[name], mesh)
    assert bool(plan.parameters) == ("tensor" in mesh)
    assert_equals_eager(partitioned(SPECS[name], mesh, plan), captured(SPECS[name]))


@pytest.mark.parametrize(
    ("name", "mesh"), cases(TEXT_SPECS, tuple(mesh for mesh in MESHES if "tensor" in mesh))
)
def test_model_with_sequence_parallelism_equals_eager(name: str, mesh: str) -> None:
    plan = megatron(SPECS[name], mesh, sequence_parallel=True)
    assert plan.activations
    assert_equals_eager(partitioned(SPECS[name], mesh, plan), captured(SPECS[name]))


@pytest.mark.parametrize("name", TEXT_SPECS)
def test_sequence_parallelism_changes_nothing_without_a_tensor_axis(name: str) -> None:
    plain = megatron(SPECS[name], "data=2")
    assert megatron(SPECS[name], "data=2", sequence_parallel=True) == plain


@pytest.mark.parametrize("name", IMAGE_SPECS)
def test_sequence_parallelism_changes_nothing_but_a_note_without_a_sequence(name: str) -> None:
    plain = megatron(SPECS[name], "data=2,tensor=2")
    sequence = megatron(SPECS[name], "data=2,tensor=2", sequence_parallel=True)
    assert (sequence.parameters, sequence.activations) == (plain.parameters, {})
    assert sequence.notes == (
        *plain.notes,
        "sequence_parallel has no effect: no embedding of inputs was found",
    )


GPT = "gpt:layers=1,hidden=24,heads={heads},vocab={vocab},seq={seq},batch={batch}"
LLAMA = (
    "hf:llama:num_hidden_layers=1,hidden_size=32,num_attention_heads={heads},"
    "num_key_value_heads={groups},intermediate_size=48,vocab_size={vocab},batch=4,seq=8"
)

ODD = {
    "batch-does-not-divide": (GPT.format(heads=4, vocab=32, seq=8, batch=3), "data=2,tensor=2"),
    "axes-of-three": (GPT.format(heads=6, vocab=33, seq=9, batch=6), "data=3,tensor=3"),
    "tensor-axis-first": (GPT.format(heads=4, vocab=32, seq=8, batch=4), "tensor=2,data=2"),
    "heads-do-not-divide": (GPT.format(heads=3, vocab=32, seq=8, batch=4), "data=2,tensor=2"),
    "odd-vocabulary": (GPT.format(heads=4, vocab=33, seq=8, batch=4), "data=2,tensor=2"),
    "odd-sequence": (GPT.format(heads=4, vocab=32, seq=7, batch=4), "data=2,tensor=2"),
    "nothing-divides": (GPT.format(heads=3, vocab=33, seq=7, batch=3), "data=2,tensor=5"),
    "untied": (GPT.format(heads=4, vocab=32, seq=8, batch=4) + ",tie=false", "data=2,tensor=2"),
    "axes-of-size-one": (GPT.format(heads=4, vocab=32, seq=8, batch=4), "data=1,tensor=1"),
    "an-idle-third-axis": (GPT.format(heads=4, vocab=32, seq=8, batch=4), "data=2,pipe=2,tensor=2"),
    "grouped-queries": (LLAMA.format(heads=4, groups=2, vocab=32), "data=2,tensor=2"),
    "fewer-groups-than-shards": (LLAMA.format(heads=8, groups=2, vocab=33), "data=2,tensor=4"),
    "one-group": (LLAMA.format(heads=4, groups=1, vocab=32), "tensor=2"),
    "fewer-heads-than-shards": (LLAMA.format(heads=2, groups=2, vocab=32), "tensor=4"),
    "odd-gpt2": (
        "hf:gpt2:n_layer=1,n_embd=24,n_head=3,vocab_size=33,n_positions=9,batch=3,seq=9",
        "data=2,tensor=2",
    ),
    "gpt2-on-three": (
        "hf:gpt2:n_layer=1,n_embd=24,n_head=6,vocab_size=33,n_positions=9,batch=3,seq=9",
        "data=3,tensor=3",
    ),
    "odd-t5": (
        "hf:t5:num_layers=1,d_model=16,d_kv=4,d_ff=24,num_heads=3,vocab_size=33,batch=3,seq=9",
        "data=2,tensor=2",
    ),
    "odd-bert": (
        "hf:bert:num_hidden_layers=1,hidden_size=24,num_attention_heads=3,intermediate_size=36,"
        "vocab_size=33,max_position_embeddings=9,batch=3,seq=9",
        "data=2,tensor=2",
    ),
    "odd-vit": (
        "hf:vit:num_hidden_layers=1,hidden_size=24,num_attention_heads=3,intermediate_size=36,"
        "image_size=8,patch_size=4,num_labels=7,batch=3",
        "data=2,tensor=2",
    ),
    "odd-unet": ("unet:channels=6,size=6,batch=3,levels=2,groups=3,heads=3", "data=2,tensor=2"),
    "cnn-on-three": ("cnn:depth=10,channels=6,size=8,batch=6", "data=3,tensor=3"),
}


FAST_ODD = (
    "axes-of-three", "tensor-axis-first", "nothing-divides", "untied", "axes-of-size-one",
    "an-idle-third-axis", "grouped-queries", "fewer-groups-than-shards",
    "fewer-heads-than-shards", "odd-bert",
)  # fmt: skip
"""Between them each kind of oddity; the others have one alone, or of another model."""


@pytest.mark.parametrize("sequence_parallel", [False, slow(True)], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", slow_where(lambda name: name not in FAST_ODD, ODD))
def test_odd_sizes_equal_eager(name: str, sequence_parallel: bool) -> None:
    spec, mesh = ODD[name]
    plan = megatron(spec, mesh, sequence_parallel=sequence_parallel)
    assert_equals_eager(partitioned(spec, mesh, plan), captured(spec))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_axes_of_other_names_are_named_in_the_options(sequence_parallel: bool) -> None:
    spec = GPT.format(heads=4, vocab=32, seq=8, batch=4)
    plan = plan_megatron(
        captured(spec).program,
        as_mesh("batch=2,model.0=2"),
        data="batch",
        tensor="model.0",
        sequence_parallel=sequence_parallel,
    )
    program = partitioned(spec, "batch=2,model.0=2", plan)
    assert {axis for one in program.stats().collectives for axis in one.axes} == {
        "batch", "model.0",
    }  # fmt: skip
    assert_equals_eager(program, captured(spec))


def test_replicated_plan_equals_eager() -> None:
    spec = SPECS["gpt"]
    plan = plan_replicated(captured(spec).program, as_mesh("data=4"))
    assert_equals_eager(partitioned(spec, "data=4", plan), captured(spec))


def test_program_for_one_device_equals_eager() -> None:
    case = captured(SPECS["gpt"])
    assert_equals_eager(run_passes(case.program, "cse,dce"), case)


FUZZED = {
    "gpt": GPT.format(heads=4, vocab=24, seq=8, batch=4),
    "gpt2": "hf:gpt2:n_layer=1,n_embd=16,n_head=4,vocab_size=24,n_positions=8,batch=4,seq=8",
    "cnn": "cnn:depth=10,channels=4,size=4,batch=4,pool=true",
}


@pytest.mark.parametrize("name", FUZZED)
@pytest.mark.parametrize("seed", slow_where(lambda seed: seed > 2, range(40)))
def test_any_plan_however_foolish_equals_eager(name: str, seed: int) -> None:
    spec = FUZZED[name]
    plan, mesh = random_plan(captured(spec).program, seed)
    program = partitioned(spec, mesh, plan)
    assert_equals_eager(program, captured(spec))
    assert verify(program) == []
