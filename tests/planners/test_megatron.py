"""megatron: which parameters of which model are cut, and how."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.pipeline import as_mesh
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.tests.eager import assert_three_steps_equal_eager
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, TEXT_SPECS, assert_equals_eager, captured, megatron

COLUMN, ROW, VECTOR = '[{"tensor"}, {}]', '[{}, {"tensor"}]', '[{"tensor"}]'
MESH = "data=2,tensor=2"


def cut_of(plan: Plan, prefix: str, suffix: str = ".weight") -> dict[str, str]:
    """The cuts of the parameters below a module, by the rest of their names."""
    return {
        name.removeprefix(prefix).removesuffix(suffix): text
        for name, text in plan.parameters.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


@pytest.mark.parametrize(
    ("name", "layer", "column", "row"),
    [
        ("gpt", "h.1.", "attn.q attn.k attn.v mlp.fc_in", "attn.proj mlp.fc_out"),
        (
            "llama",
            "model.layers.1.",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
            "self_attn.o_proj mlp.down_proj",
        ),
        (
            "bert",
            "bert.encoder.layer.1.",
            "attention.self.query attention.self.key attention.self.value intermediate.dense",
            "attention.output.dense output.dense",
        ),
        (
            "vit",
            "vit.layers.1.",
            "attention.q_proj attention.k_proj attention.v_proj mlp.fc1",
            "attention.o_proj mlp.fc2",
        ),
        (
            "t5",
            "decoder.block.1.",
            "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v "
            "layer.1.EncDecAttention.q layer.1.EncDecAttention.k layer.1.EncDecAttention.v "
            "layer.2.DenseReluDense.wi",
            "layer.0.SelfAttention.o layer.1.EncDecAttention.o layer.2.DenseReluDense.wo",
        ),
        ("unet", "mid_attn.", "q k v", "proj"),
        ("unet", "time_embedding.", "fc_in", "fc_out"),
    ],
)
def test_column_and_row_parallel_weights_of_a_layer(
    name: str, layer: str, column: str, row: str
) -> None:
    plan = megatron(SPECS[name], MESH)
    expected = dict.fromkeys(column.split(), COLUMN) | dict.fromkeys(row.split(), ROW)
    assert cut_of(plan, layer) == expected


@pytest.mark.parametrize(
    ("name", "layer", "cut"),
    [
        ("gpt", "h.0.", "attn.q attn.k attn.v mlp.fc_in"),
        ("vit", "vit.layers.0.", "attention.q_proj attention.k_proj attention.v_proj mlp.fc1"),
    ],
)
def test_bias_of_a_column_is_cut_and_that_of_a_row_is_whole(
    name: str, layer: str, cut: str
) -> None:
    assert cut_of(megatron(SPECS[name], MESH), layer, ".bias") == dict.fromkeys(cut.split(), VECTOR)


def test_fused_projection_of_gpt2_is_cut_by_head_within_each_of_its_three_parts() -> None:
    plan = megatron(SPECS["gpt2"], MESH)
    # 16 features for each of q, k and v: a device holds 8 of each, so the cut has stride 8.
    assert cut_of(plan, "transformer.h.0.") == {
        "attn.c_attn": '[{}, {"tensor":8}]',
        "attn.c_proj": COLUMN,  # GPT-2 stores weights as inputs x outputs
        "mlp.c_fc": ROW,
        "mlp.c_proj": COLUMN,
    }
    assert cut_of(plan, "transformer.h.0.", ".bias") == {
        "attn.c_attn": '[{"tensor":8}]',
        "mlp.c_fc": VECTOR,
    }


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("gpt", "wte.weight", None),
        ("gpt2", "transformer.wte.weight", None),
        ("llama", "model.embed_tokens.weight", "lm_head.weight"),
        ("bert", "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"),
        ("t5", "shared.weight", None),
    ],
)
def test_vocabulary_is_cut_in_the_embedding_and_the_head(
    name: str, embedding: str, head: str | None
) -> None:
    plan = megatron(SPECS[name], MESH)
    assert plan.parameters[embedding] == COLUMN
    if head is not None:
        assert plan.parameters[head] in (COLUMN, VECTOR)
    assert plan.notes == ()


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_norms_and_positions_stay_whole(name: str) -> None:
    named = megatron(SPECS[name], MESH).parameters
    assert not [n for n in named if "ln_" in n or "LayerNorm" in n or "position" in n or "wpe" in n]


def test_convolutions_of_a_residual_block_are_a_pair_with_the_batch_norm_between() -> None:
    plan = megatron(SPECS["cnn"], MESH)
    assert cut_of(plan, "stages.2.0.") == {
        "conv_1": '[{"tensor"}, {}, {}, {}]',
        "bn_1": VECTOR,
        "conv_2": '[{}, {"tensor"}, {}, {}]',
    }


GROUPED = (
    "hf:llama:num_hidden_layers=1,hidden_size=16,num_attention_heads=4,num_key_value_heads={groups},"
    "intermediate_size=32,vocab_size=32,batch=4,seq=8"
)


def test_grouped_queries_are_cut_with_their_keys_and_values_where_the_groups_divide() -> None:
    attention = cut_of(megatron(GROUPED.format(groups=2), "tensor=2"), "model.layers.0.self_attn.")
    assert attention == {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_queries_alone_are_cut_where_there_are_fewer_groups_than_devices(
    implementation: str,
) -> None:
    spec = f"{GROUPED.format(groups=2)},attn_implementation={implementation}"
    attention = cut_of(megatron(spec, "tensor=4"), "model.layers.0.self_attn.")
    assert attention == {"q_proj": COLUMN, "o_proj": ROW}


class Attention(nn.Module):
    """A linear map, an attention, and a linear map."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).square().sum()


class Grouped(nn.Module):
    """Query heads that share a few heads of keys and values, all of size 4."""

    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.q = nn.Linear(16, 4 * heads, bias=False, dtype=torch.float64)
        self.k, self.v = (nn.Linear(16, 4 * groups, bias=False, dtype=torch.float64) for _ in "kv")
        self.o = nn.Linear(4 * heads, 16, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("groups", [2, 3])
def test_queries_that_share_too_few_keys_are_cut_and_keys_repeated(groups: int) -> None:
    """Four devices for two heads of keys, two for three: the devices hold all keys."""
    model, size = Attention(Grouped(4 * groups, groups)), 4 if groups == 2 else 2

    def batch() -> tuple[Tensor]:
        return (torch.randn(2, 8, 16, dtype=torch.float64),)

    program = capture(model, batch())
    plan = plan_megatron(program, as_mesh(f"tensor={size}"))
    assert cut_of(plan, "attention.") == {"q": COLUMN, "o": ROW}
    local = local_program(program, plan)
    attentions = [op for op in local.ops if "flash_attention" in op.name]
    heads = [shape_of(value)[1] for op in attentions for value in op.operands[-3:]]
    assert set(heads) == {4 * groups // size}
    # Of the forward pass one, and one for each gradient of keys and values, which are sums.
    collectives = [(one.kind, one.count) for one in local.stats().collectives]
    assert collectives == [("all_reduce", 1), ("all_reduce", 2)]
    assert_three_steps_equal_eager(model, batch, mesh=f"data=2,tensor={size}")


class Fused(nn.Module):
    """torch's own, whose projections of queries, keys and values are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Masked(Fused):
    """With a mask of tokens that torch expands over heads, as dropout makes it do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > 1.0
        return self.inner(x, x, x, key_padding_mask=mask, need_weights=False)[0]


FUSED_PARTS = {
    "inner.in_proj_weight": '[{"tensor":8}, {}]',
    "inner.in_proj_bias": '[{"tensor":8}]',
    "inner.out_proj.weight": ROW,
}
PARTS = {
    Grouped: {"q.weight": COLUMN, "k.weight": COLUMN, "v.weight": COLUMN, "o.weight": ROW},
    Fused: FUSED_PARTS,
    Masked: FUSED_PARTS,
}


@pytest.mark.parametrize("attention", [Grouped, Fused, Masked])
def test_attention_of_torch_is_cut_by_heads_with_one_message_each_way(
    attention: type[nn.Module],
) -> None:
    model = Attention(attention())

    def batch() -> tuple[Tensor]:
        return (torch.randn(2, 8, 16, dtype=torch.float64),)

    program = capture(model, batch())
    plan = plan_megatron(program, as_mesh("tensor=2"))
    assert cut_of(plan, "attention.", "") == PARTS[attention]
    assert plan.notes == ()
    local = local_program(program, plan)
    # The one of the forward pass; the input has no gradient.
    assert [(one.kind, one.count) for one in local.stats().collectives] == [("all_reduce", 1)]
    assert_three_steps_equal_eager(model, batch, mesh="data=2,tensor=2")


def test_causal_llama_is_captured_causal_and_grouped_without_a_mask() -> None:
    program = captured(GROUPED.format(groups=2)).program
    attention = next(op for op in program.ops if "flash_attention" in op.name)
    assert [shape_of(value)[1] for value in attention.operands] == [4, 2, 2]
    assert "is_causal = true" in str(attention)
    squares = [op for op in program.ops for v in op.results if shape_of(v)[-2:] == (8, 8)]
    assert squares == []


@pytest.mark.parametrize(("groups", "mesh"), [(1, "tensor=8"), (4, "tensor=3")])
def test_attention_whose_heads_do_not_divide_stays_whole(groups: int, mesh: str) -> None:
    plan = megatron(GROUPED.format(groups=groups), mesh)
    assert cut_of(plan, "model.layers.0.self_attn.") == {}


def test_residual_stream_is_never_cut_for_want_of_anything_better() -> None:
    plan = megatron(GROUPED.format(groups=1), "tensor=8")
    assert cut_of(plan, "model.layers.0.") == {
        "mlp.gate_proj": COLUMN, "mlp.up_proj": COLUMN, "mlp.down_proj": ROW,
    }  # fmt: skip


def test_odd_vocabulary_is_cut() -> None:
    plan = megatron("gpt:layers=1,hidden=16,heads=4,vocab=33,seq=8,batch=4", "tensor=2")
    assert plan.parameters["wte.weight"] == '[{"tensor"}, {}]'
    assert "h.0.attn.q.weight" in plan.parameters
    assert plan.notes == ()


def test_heads_that_do_not_divide_are_read_in_other_shards_than_they_are_stored_in() -> None:
    plan = megatron("gpt:layers=2,hidden=24,heads=4,vocab=33,seq=8,batch=4", "tensor=3")
    assert plan.parameters["h.0.attn.q.weight"] == '[{"tensor"}, {}]'
    assert plan.used["h.0.attn.q.weight"] == '[{"tensor":12}, {}]'
    assert plan.used["h.0.attn.proj.weight"] == '[{}, {"tensor":12}]'
    assert "h.0.mlp.fc_in.weight" not in plan.used
    assert plan.notes == ()


def test_fewer_heads_than_devices_leave_attention_whole_with_a_note() -> None:
    plan = megatron("gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4", "tensor=7")
    assert "h.0.attn.q.weight" not in plan.parameters
    assert plan.parameters["h.0.mlp.fc_in.weight"] == '[{"tensor"}, {}]'
    assert plan.notes == (
        "'h.0.attn.q' and 2 more linear maps, to 'h.0.attn.v', stay whole: their 4 groups of 4 "
        "features (such as heads) do not divide by tensor=7, and sharded in any other way, their "
        "weights would be gathered at each use",
    )


def test_axis_that_the_rule_does_not_use_is_noted() -> None:
    plan = megatron(SPECS["gpt"], "data=2,model=4")
    assert plan.parameters == {}
    assert plan.notes == (
        "axis 'model' of the mesh is idle: the planner uses 'replica', 'data', 'tensor', "
        "'context', 'expert' and 'space' alone",
    )


def test_misspelt_axis_of_size_one_is_noted_and_another_is_not() -> None:
    (note,) = megatron(SPECS["gpt"], "data=2,tensr=1,mine=1").notes
    assert note.startswith("axis 'tensr' of the mesh is idle: did you mean 'tensor'? the planner")


def test_axes_can_have_other_names() -> None:
    program = captured(SPECS["gpt"]).program
    plan = plan_megatron(program, as_mesh("batch=2,model=4"), data="batch", tensor="model")
    assert plan.inputs["input_ids"] == '[{"batch"}, {}]'
    assert plan.parameters["h.0.attn.q.weight"] == '[{"model"}, {}]'
    assert plan.notes == ()


@pytest.mark.parametrize("name", SPECS)
def test_batch_is_cut_over_the_data_axis_in_every_input(name: str) -> None:
    plan = megatron(SPECS[name], "data=2")
    inputs = [s.name for s in captured(SPECS[name]).program.arguments if s.kind == "input"]
    assert list(plan.inputs) == inputs
    assert all(text.startswith('[{"data"}') for text in plan.inputs.values())
    assert plan.parameters == {}


def test_batch_that_does_not_divide_is_cut_and_one_that_is_too_short_stays_whole() -> None:
    spec = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch={}"
    plan = megatron(spec.format(3), "data=2")
    assert plan.inputs["input_ids"] == '[{"data"}, {}]'
    assert plan.notes == ()
    plan = megatron(spec.format(1), "data=2")
    assert plan.inputs == {}
    assert plan.notes[0] == (
        "input 'input_ids' stays whole: its first dim 1 is too short for data=2"
    )


@pytest.mark.parametrize("name", TEXT_SPECS)
def test_sequence_parallelism_cuts_the_embeddings_output_along_the_sequence(name: str) -> None:
    plain = megatron(SPECS[name], MESH)
    plan = megatron(SPECS[name], MESH, sequence_parallel=True)
    layers = {"gpt": ["wte"], "t5": ["encoder.embed_tokens", "decoder.embed_tokens"]}
    assert list(plan.activations) == layers.get(name, list(plan.activations))
    assert set(plan.activations.values()) == {'[{"data"}, {"tensor"}, {}]'}
    assert (plan.parameters, plan.inputs) == (plain.parameters, plain.inputs)


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "replica=2,data=2,tensor=2", "tensor=2"])
def test_sequence_parallelism_of_a_batch_that_does_not_divide_sends_no_more(mesh: str) -> None:
    spec = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch={}"
    counts: list[list[tuple[str, tuple[str, ...], int]]] = []
    for batch in (8, 7):
        found = captured(spec.format(batch))
        plan = plan_megatron(found.program, as_mesh(mesh), sequence_parallel=True)
        step = local_program(found.program, plan)
        assert_equals_eager(step, found)
        counts.append([(one.kind, one.axes, one.count) for one in step.stats().collectives])
    assert counts[0] == counts[1]


def test_sequence_that_does_not_divide_is_not_cut_and_noted() -> None:
    spec = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=7,batch=4"
    plan = megatron(spec, "tensor=2", sequence_parallel=True)
    assert plan.activations == {}
    assert plan.notes == (
        "no sequence parallelism from 'wte': its output [4, 7, 16] has no dim 1 that divides by "
        "tensor=2",
    )


def test_plan_says_its_mesh_and_planner() -> None:
    plan = megatron(SPECS["gpt"], MESH)
    assert (plan.planner, plan.mesh) == ("megatron", {"data": 2, "tensor": 2})


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("perlmutter:nodes=2", {"data": 2, "tensor": 4}),
        ("amp-het-cluster", {"data": 4, "tensor": 4}),
        ("testbed", {"data": 2, "tensor": 1}),
    ],
)
def test_without_a_mesh_tensor_parallelism_stays_inside_the_nodes(
    cluster: str, expected: dict[str, int]
) -> None:
    program = captured(SPECS["gpt"]).program
    assert plan_megatron(program, None, cluster=find_cluster(cluster)).mesh == expected


def test_without_a_mesh_tensor_takes_the_largest_degree_over_which_anything_divides() -> None:
    program = captured("gpt:layers=1,hidden=6,heads=2,vocab=6,seq=8,batch=8").program
    plan = plan_megatron(program, None, cluster=find_cluster("perlmutter:nodes=1"))
    # The MLP has 24 features; but for it, 4 would divide nothing.
    assert plan.mesh == {"data": 1, "tensor": 4}
    assert "h.0.mlp.fc_in.weight" in plan.parameters


def test_mesh_over_which_nothing_can_be_cut_has_a_note_for_every_axis() -> None:
    spec = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=1"
    plan = plan_megatron(captured(spec).program, as_mesh("data=3,tensor=99"))
    idle = [note for note in plan.notes if "is idle" in note]
    assert [note.split("'")[1] for note in idle] == ["data"]


def test_table_with_too_few_rows_stays_whole() -> None:
    text = """
        param %few : tensor<1x8xf32>
        param %many : tensor<8x8xf32>
        input %ids : tensor<4xi64>
        %a = aten.embedding(%few, %ids) : tensor<4x8xf32>
        %b = aten.embedding(%many, %ids) : tensor<4x8xf32>
        %c = aten.add.Tensor(%a, %b) : tensor<4x8xf32>
        output %c
    """
    assert plan_megatron(step(text), Mesh(tensor=2)).parameters == {"many": '[{"tensor"}, {}]'}
