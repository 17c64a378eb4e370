"""The models that the command line can name: they build, train one step, and explain errors."""

import logging
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.utils import logging as transformers_logging

from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.driver import model_size
from shardweave.driver.model_size import check_size
from shardweave.driver.models.hf import build_hf
from shardweave.driver.models.models import Example, announce, build_example, parse_options
from shardweave.ir.capture.capture import capture
from shardweave.tests.marks import slow

OWN_SPECS = {
    "gpt": "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8,batch=2",
    "unet": "unet:channels=8,size=8,batch=2,levels=2,groups=4,heads=2",
    "cnn": "cnn:depth=10,channels=4,size=16,batch=2,pool=true",
}
HF_SPECS = {
    "gpt2": "hf:gpt2:n_layer=2,n_embd=16,n_head=2,vocab_size=32,batch=2,seq=8",
    "llama": (
        "hf:llama:num_hidden_layers=2,hidden_size=16,num_attention_heads=2,"
        "num_key_value_heads=1,intermediate_size=32,vocab_size=32,batch=2,seq=8"
    ),
    "bert": (
        "hf:bert:num_hidden_layers=2,hidden_size=16,num_attention_heads=2,"
        "intermediate_size=32,vocab_size=32,batch=4,seq=8"
    ),
    "vit": (
        "hf:vit:num_hidden_layers=2,hidden_size=16,num_attention_heads=2,"
        "intermediate_size=32,image_size=8,patch_size=4,num_labels=5,batch=2"
    ),
    "t5": "hf:t5:num_layers=2,d_model=16,d_kv=8,d_ff=32,num_heads=2,vocab_size=32,batch=2,seq=8",
}
MIXTRAL = (
    "hf:mixtral:num_hidden_layers=1,hidden_size=16,num_attention_heads=2,num_key_value_heads=1,"
    "head_dim=8,intermediate_size=16,num_local_experts=2,vocab_size=32,batch=2,seq=8"
)
SPECS = {**OWN_SPECS, **HF_SPECS}
every_family = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def loss_of(example: Example) -> Tensor:
    """Run the model on its batch; the loss is a scalar or the field of that name."""
    result = example.module(**example.kwargs)
    return result if isinstance(result, Tensor) else result.loss


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module, empty at first, named `user_models`."""
    module = types.ModuleType("user_models")
    monkeypatch.setitem(sys.modules, "user_models", module)
    return module


class MeanOfLinear(nn.Module):
    """The smallest model of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean()


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_model_trains_on_its_batch(spec: str, dtype: torch.dtype) -> None:
    example = build_example(spec, dtype=dtype)
    loss = loss_of(example)
    loss.backward()
    assert example.module.training
    assert loss.shape == ()
    assert loss.isfinite()
    for name, parameter in example.module.named_parameters():
        assert parameter.dtype == dtype, name
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("spec", HF_SPECS.values(), ids=HF_SPECS.keys())
def test_transformers_warns_of_nothing_while_a_model_is_built_and_run(
    spec: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its logger does not propagate, and would not repeat what an earlier test made it say.
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    transformers_logging.warning_once.cache_clear()
    loss_of(build_example(spec))
    assert caplog.messages == []


@every_family
def test_same_seed_gives_same_model_and_another_seed_another(spec: str) -> None:
    first, again, other = (build_example(spec, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(first.kwargs[name], again.kwargs[name]) for name in first.kwargs)
    weights = zip(first.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    weights = zip(first.module.parameters(), other.module.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in weights)


@every_family
def test_fake_model_has_the_parameters_of_the_real_one(spec: str) -> None:
    with FakeTensorMode():
        fake = build_example(spec)
    real = build_example(spec)
    assert all(isinstance(p, FakeTensor) for p in fake.module.parameters())
    assert all(isinstance(value, FakeTensor) for value in fake.kwargs.values())
    # Also compares ties: a tied parameter has one name.
    assert shapes_by_name(fake) == shapes_by_name(real)


def shapes_by_name(example: Example) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = {**dict(example.module.named_parameters()), **example.kwargs}
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def test_building_leaves_the_global_random_state_and_dtype_alone() -> None:
    before = torch.get_rng_state()
    build_example(OWN_SPECS["gpt"], dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


def test_gpt_of_gpt3_size_is_built_without_its_memory() -> None:
    with FakeTensorMode():
        example = build_example("gpt:layers=96,hidden=12288,heads=96,vocab=50257,seq=2048")
    num_parameters = sum(p.numel() for p in example.module.parameters())
    assert 174e9 < num_parameters < 176e9


def test_gpt_layers_have_megatron_names_and_q_k_v_apart() -> None:
    module = build_example("gpt:layers=1,hidden=16,heads=2,ffn=24").module
    names = {name for name, _ in module.named_parameters() if name.startswith("h.0.")}
    parts = ("ln_1", "attn.q", "attn.k", "attn.v", "attn.proj", "ln_2", "mlp.fc_in", "mlp.fc_out")
    assert names == {f"h.0.{part}.{leaf}" for part in parts for leaf in ("weight", "bias")}
    assert module.get_parameter("h.0.mlp.fc_in.weight").shape == (24, 16)


@pytest.mark.parametrize(("spec", "is_tied"), [("gpt", True), ("gpt:tie=false", False)])
def test_gpt_head_is_the_token_embedding_unless_untied(spec: str, is_tied: bool) -> None:
    module = build_example(spec).module
    assert (module.get_parameter("head.weight") is module.get_parameter("wte.weight")) is is_tied


def test_gpt_labels_are_the_next_tokens() -> None:
    inputs = build_example("gpt:seq=8,batch=2").kwargs
    assert torch.equal(inputs["input_ids"][:, 1:], inputs["labels"][:, :-1])


def test_unet_image_keeps_its_shape() -> None:
    example = build_example(OWN_SPECS["unet"])
    noisy, timesteps = example.kwargs["noisy"], example.kwargs["timesteps"]
    predicted = example.module.predict_noise(noisy, timesteps)  # type: ignore[operator]
    assert predicted.shape == noisy.shape


def test_cnn_updates_its_running_statistics() -> None:
    example = build_example(OWN_SPECS["cnn"])
    before = example.module.get_buffer("bn_in.running_mean").clone()
    loss_of(example)
    assert not torch.equal(example.module.get_buffer("bn_in.running_mean"), before)


def test_dropout_fields_are_zero_and_a_note_lists_them() -> None:
    example = build_example(HF_SPECS["gpt2"])
    assert example.module.config.attn_pdrop == 0.0  # type: ignore[union-attr]
    assert example.notes == (
        "dropout fields set to 0: attn_pdrop, embd_pdrop, resid_pdrop, summary_first_dropout",
    )


def test_given_dropout_stays_and_the_note_leaves_it_out() -> None:
    example = build_example(HF_SPECS["gpt2"] + ",attn_pdrop=0.25,embd_pdrop=0")
    assert example.module.config.attn_pdrop == 0.25  # type: ignore[union-attr]
    assert example.notes == ("dropout fields set to 0: resid_pdrop, summary_first_dropout",)


def test_unset_fields_keep_the_defaults_of_hugging_face() -> None:
    config = build_example(HF_SPECS["bert"]).module.config
    assert config.max_position_embeddings == 512  # type: ignore[union-attr]
    assert config.hidden_act == "gelu"  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_no_cache_is_kept_in_training(family: str) -> None:
    config = build_example(HF_SPECS[family]).module.config
    assert config.use_cache is False  # type: ignore[union-attr]


def test_special_tokens_beyond_a_small_vocabulary_are_dropped() -> None:
    config = build_example(HF_SPECS["gpt2"]).module.config
    assert config.eos_token_id is None  # type: ignore[union-attr]
    assert config.bos_token_id is None  # type: ignore[union-attr]


def test_masked_language_model_is_asked_for_some_tokens_and_never_for_padding() -> None:
    inputs = build_example(HF_SPECS["bert"].replace("seq=8", "seq=32")).kwargs
    is_asked, is_token = inputs["labels"] != -100, inputs["attention_mask"] == 1
    assert 0 < is_asked.sum() < is_token.sum() < is_token.numel()
    assert is_asked.any(dim=1).all()
    assert not (is_asked & ~is_token).any()
    assert torch.equal(inputs["labels"][is_asked], inputs["input_ids"][is_asked])


def test_sequences_are_no_longer_than_the_positions() -> None:
    example = build_example("hf:gpt2:n_layer=1,n_embd=8,n_head=2,vocab_size=32,n_positions=16")
    assert example.kwargs["input_ids"].shape == (8, 16)
    assert "seq 32 cut to 16, the model's n_positions" in example.notes


def test_causal_loss_of_hugging_face_keeps_float64() -> None:
    example = build_example(HF_SPECS["llama"], dtype=torch.float64)
    loss = loss_of(example)
    logits = example.module(example.kwargs["input_ids"]).logits
    expected = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), example.kwargs["labels"][:, 1:].flatten()
    )
    assert loss.dtype == torch.float64
    assert abs(loss.item() - expected.item()) < 1e-14
    assert any("float64" in note for note in example.notes)


def test_eager_experts_are_refused_with_the_module_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.experts'.*batched_mm"):
        build_example(MIXTRAL + ",experts_implementation=eager")


def test_batched_experts_train() -> None:
    loss_of(build_example(MIXTRAL + ",experts_implementation=batched_mm")).backward()


def test_experts_run_in_a_form_that_can_be_captured_and_equals_eager() -> None:
    example = build_example(MIXTRAL, dtype=torch.float64)
    note = "experts run in one product, every expert computing every token"
    assert f"{note}, in place of grouped_mm, the default" in example.notes
    program = capture(example.module, kwargs=example.kwargs)
    values = values_of(program, example.module, example.kwargs)
    results = run_reference(program, values)
    loss = loss_of(example)
    loss.backward()
    torch.testing.assert_close(results["output", "0"], loss.detach())
    for name, parameter in example.module.named_parameters():
        torch.testing.assert_close(results["grad", name], parameter.grad, msg=name)


def test_experts_in_the_default_form_of_hugging_face_are_captured_and_equal_eager() -> None:
    example = build_example(MIXTRAL + ",experts_implementation=grouped_mm", dtype=torch.float64)
    program = capture(example.module, kwargs=example.kwargs)
    assert "dist.grouped_mm" in str(program)
    results = run_reference(program, values_of(program, example.module, example.kwargs))
    other = build_example(MIXTRAL + ",experts_implementation=batched_mm", dtype=torch.float64)
    loss = loss_of(other)
    loss.backward()
    torch.testing.assert_close(results["output", "0"], loss.detach())
    for name, parameter in other.module.named_parameters():
        torch.testing.assert_close(results["grad", name], parameter.grad, msg=name)


@pytest.mark.parametrize("spec", HF_SPECS.values(), ids=HF_SPECS.keys())
def test_parameters_are_counted_without_the_model(spec: str) -> None:
    model_type, _, options = spec.removeprefix("hf:").partition(":")
    built = sum(parameter.numel() for parameter in build_example(spec).module.parameters())
    given = parse_options(options)
    made = check_size(spec, lambda: build_hf(model_type, given, torch.float32)[:2], torch.float32)
    assert made.parameters == built


def test_model_of_full_size_is_announced_before_it_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_size, "memory_bytes", lambda: 2**36)
    announce("hf:llama", torch.float32)
    assert capsys.readouterr().err == (
        "hf:llama has 6,738,415,616 parameters (25.1 GiB), which take a while to make; for a small "
        "model give its sizes, as in hf:llama:num_hidden_layers=2,hidden_size=64,...\n"
    )


@pytest.mark.parametrize("spec", [HF_SPECS["llama"], "gpt:layers=1", "hf", "package.module:make"])
def test_small_models_and_those_of_other_kinds_are_not_announced(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(spec, torch.float32)
    assert capsys.readouterr().err == ""


def test_values_are_read_as_numbers_words_or_text() -> None:
    options = parse_options("a=3,b=1e-5,c=true,d=False,e=none,f=gelu_new")
    assert options == {"a": 3, "b": 1e-5, "c": True, "d": False, "e": None, "f": "gelu_new"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet", r"'resnet' is unknown; .*gpt:.*unet:.*cnn:.*hf:.*package\.module:factory"),
        (":make", r"':make' is unknown; .*package\.module:factory"),
        ("gpt:layer=2", r"unknown key 'layer'; .*layers=2, hidden=64, heads=4.*tie=true"),
        ("gpt:dropout=2", "dropout=2 is not a probability; use 0 to 1"),
        ("gpt:heads=5", r"heads=5 does not divide hidden=64; use one of heads=\[1, 2, 4"),
        ("gpt:layers=two", r"layers=two must be an integer"),
        ("gpt:layers=0", r"layers=0 must be positive"),
        ("gpt:tie=1", r"tie=1 must be true or false"),
        ("gpt:layers", r"'layers' .*key=value"),
        ("gpt:layers=1,layers=2", r"'layers' is given twice"),
        ("unet:size=30", r"size=30 cannot be halved 2 times.*multiple of 4"),
        ("unet:groups=5", r"groups=5 does not divide channels=32"),
        ("unet:channels=9,groups=3,heads=3", r"channels=9 is odd"),
        ("cnn:depth=50", r"depth=50 .*\[10, 18, 34\]"),
        ("hf", r"write hf:TYPE"),
        (
            "hf:gpt3",
            r"^hf: model type 'gpt3' is unknown or has no training head; did you mean .{,60}There are \d+\.$",
        ),
        ("hf:zzzz", r"has no training head; use a name .*such as bert, .{,60}There are \d+\.$"),
        ("gtp:layers=2", r"no module 'gtp' found from .*; did you mean 'gpt'\? a model is gpt:"),
        ("hf:gpt2:layers=2", r"hf:gpt2 has no option layers; its options are .*n_layer.*batch"),
        ("hf:resnet:out_features=3", r"hf:resnet with out_features=3 cannot be built; .* a list"),
        ("hf:gpt2:n_layer=two", r"hf:gpt2: the config refuses .*n_layer.*expected int"),
        ("hf:gpt2:n_embd=16,n_head=3", r"hf:gpt2: .*divisible by num_heads"),
        ("hf:gpt2:batch=0", r"batch=0 is not a positive integer"),
        ("hf:qwen2:num_attention_heads=4", r"num_key_value_heads=32 does not divide"),
        ("gpt:layers=10001", r"^gpt: option layers=10001 is too large; use at most 10,000"),
        ("gpt:hidden=99999999999999999999", r"^gpt: option hidden=a larger number is too large"),
        ("hf:gpt2:tiny,n_layer=1000000", r"^hf:gpt2: option n_layer=.* use at most 10,000"),
        (
            "hf:llama:tiny,num_attention_heads=0",
            r"^hf:llama with num_attention_heads=0 cannot be built; transformers says: \w+Error: ",
        ),
        (
            "hf:llama:tiny,rms_norm_eps=0.1,hidden_act=nonsense",
            r"^hf:llama with hidden_act=nonsense cannot be built; .*KeyError: 'nonsense'",
        ),
        ("hf:llama:tiny,pad_token_id=999", r"with pad_token_id=999 cannot be built; .*Padding"),
        ("hf:vit:tiny,patch_size=0", r"with patch_size=0 cannot be built; .*ZeroDivisionError"),
        ("sys:exit", r"factory sys:exit ended the program \(SystemExit\); --debug shows"),
        ("math:sqrt", r"factory math:sqrt failed \(TypeError: .*--debug shows"),
        ("no_such_package.models:make", r"no module 'no_such_package' found from .*hf:TYPE"),
        ("user_models:make", r"'make' does not exist in module user_models; .*none"),
    ],
)
@pytest.mark.usefixtures("factories")
def test_error_says_what_was_found_and_what_exists(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_example(spec)


@pytest.mark.parametrize("as_example", [False, True])
def test_factory_may_return_a_pair_or_an_example(
    factories: types.ModuleType, as_example: bool
) -> None:
    pair = (MeanOfLinear().eval(), {"x": torch.ones(4, 3)})
    factories.make = lambda: Example(*pair) if as_example else pair  # type: ignore[attr-defined]
    example = build_example("user_models:make")
    assert example.module is pair[0]
    assert example.module.training
    assert example.notes == ()


def test_factory_runs_under_the_seed(factories: types.ModuleType) -> None:
    factories.make = lambda: (MeanOfLinear(), {"x": torch.randn(4, 3)})  # type: ignore[attr-defined]
    first, again = (build_example("user_models:make", seed=5) for _ in range(2))
    assert torch.equal(first.kwargs["x"], again.kwargs["x"])


def test_factory_model_is_converted_to_the_dtype_with_a_note(factories: types.ModuleType) -> None:
    factories.make = lambda: (  # type: ignore[attr-defined]
        MeanOfLinear(),
        {"x": torch.ones(4, 3)},
    )
    example = build_example("user_models:make", dtype=torch.float64)
    assert loss_of(example).dtype == torch.float64
    assert example.notes == (
        "parameters and inputs of factory user_models:make converted to torch.float64",
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (MeanOfLinear(), r"returned MeanOfLinear; .*\(module, inputs\), .* by argument name"),
        ((len, {}), r"builtin_function_or_method as its module; .*torch.nn.Module"),
        ((MeanOfLinear(), "x"), r"returned str as its inputs; .*dict of tensors"),
        ((MeanOfLinear(), [1]), r"returned int as input 'x'; .*tensor"),
        (
            (MeanOfLinear(), torch.ones(2, 2, 3).unbind()),
            r"returned 2 inputs, but the model's forward takes x: too many positional arguments",
        ),
        ((MeanOfLinear(), {"x": 1}), r"returned int as input 'x'; .*tensor"),
    ],
)
def test_wrong_return_of_a_factory_is_named(
    factories: types.ModuleType, made: object, message: str
) -> None:
    factories.make = lambda: made  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        build_example("user_models:make")


def test_factory_may_give_inputs_in_the_order_of_forward(factories: types.ModuleType) -> None:
    x = torch.ones(2, 3)
    for batch in (x, (x,), [x], {"x": x}):
        factories.make = lambda batch=batch: (MeanOfLinear(), batch)  # type: ignore[attr-defined]
        assert build_example("user_models:make").kwargs == {"x": x}


def test_factory_is_found_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import torch\ndef make():\n    return torch.nn.Identity(), {'input': torch.ones(())}\n"
    )
    (tmp_path / "models_of_this_folder.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert build_example("models_of_this_folder:make").kwargs["input"] == 1


def test_failing_import_inside_a_factory_module_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_with_a_need.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"models_with_a_need failed: it needs no_such_package"):
        build_example("models_with_a_need:make")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.exit(0)", r"^importing its_model ended the program at .*its_model.py:1"),
        ("1 / 0", r"^importing its_model failed at .*its_model.py:1 \(ZeroDivisionError: division"),
        ("def make(): return {}['x']", r"^factory its_model:make failed at .*:1 \(KeyError: 'x'"),
    ],
)
def test_factory_that_fails_or_ends_the_program_is_one_line(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its_model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "its_model", raising=False)
    with pytest.raises(ValueError, match=said) as error:
        build_example("its_model:make")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gpt:hidden=100000,heads=1,vocab=10", r"of memory; give smaller sizes"),
        ("gpt:hidden=100000000,heads=1,layers=1", r"larger than any|more than the limit"),
        (
            "gpt:batch=100000000,seq=100000",
            r"elements of parameters and inputs, more than the limit",
        ),
        ("unet:levels=28,size=134217728", r"larger than any|at most|more than|of memory"),
        ("gpt:layers=9000", r"has more than 100,000 modules|of memory"),
        ("hf:gpt2:n_embd=3000000,n_head=1", r"of memory|more than the limit|larger"),
    ],
)
def test_model_too_large_for_the_machine_is_refused_before_it_is_built(
    spec: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_size, "memory_bytes", lambda: 2**36)
    monkeypatch.setattr(model_size, "MOST_MODULES", 2000)
    with pytest.raises(ValueError, match=said.replace("100,000", "2,000")):
        announce(spec, torch.float32)


@pytest.mark.parametrize("model_type", ["llama", slow("vit"), slow("mpt"), "siglip"])
def test_tiny_model_is_small_and_can_be_captured(model_type: str) -> None:
    example = build_example(f"hf:{model_type}:tiny", dtype=torch.float64)
    assert sum(p.numel() for p in example.module.parameters()) < 200_000
    assert len(list(capture(example.module, kwargs=example.kwargs).ops)) > 20


@pytest.mark.parametrize(
    "model_type", ["gpt_neo", "gptj", "swin", "pvt_v2", "efficientnet", "wav2vec2", "detr"]
)
def test_tiny_model_whose_sizes_depend_on_one_another_gives_a_loss(model_type: str) -> None:
    example = build_example(f"hf:{model_type}:tiny", dtype=torch.float64)
    assert sum(p.numel() for p in example.module.parameters()) < 200_000
    assert example.module(**example.kwargs).loss.isfinite()


def test_field_of_a_nested_config_is_named_with_a_dot() -> None:
    example = build_example("hf:siglip:tiny,vision_config.hidden_size=16")
    assert example.module.config.vision_config.hidden_size == 16  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
