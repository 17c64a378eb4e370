"""How kernels are chosen and launched, without a device: settings, candidates, grids, places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch import launch as launching
from shardweave.backends.triton.launch import tune
from shardweave.backends.triton.launch.launch import FusedCall, grid_of, product_precision
from shardweave.backends.triton.source.joining import num_partial
from shardweave.backends.triton.source.parts import PartsQueue
from shardweave.backends.triton.source.source import Config, Kernel
from shardweave.ir.dialects.kernel import FusedOp, fuse
from shardweave.tests.backends.kernel_cases import COLUMNS, KEPT, POINTWISE, ROWS, region
from shardweave.tests.ir_text import step


def fused(text: str) -> FusedOp:
    """All ops of a text as one region."""
    program = step(text)
    ops = list(program.ops)
    KEPT.append(program)
    return fuse(ops, program.return_op, list(range(len(ops))))


def gelu() -> FusedOp:
    return region(POINTWISE["bias, gelu and residual"], 4, 8, 1, torch.float32)


# Candidates


def times_by(config: Callable[[Any], float]) -> Callable[..., float]:
    """A `do_bench` that takes what a function of the configuration says."""
    return lambda run, warmup, rep: config(run())


def test_candidate_that_fails_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = generate(gelu())

    def seconds(config: Config) -> float:
        if config == kernel.configs[0]:
            raise RuntimeError("PassManager::run failed\nin detail")
        return 2.0 if config == tune.ATEN else 1.0 if config == kernel.configs[3] else 3.0

    monkeypatch.setattr("triton.testing.do_bench", times_by(seconds))
    choice = tune.fastest_config(kernel, lambda config: lambda: config)
    assert choice.config == kernel.configs[3]
    assert len(choice.failures) == 1
    assert "RuntimeError PassManager::run failed" in choice.failures[0]
    assert "in detail" not in choice.failures[0]


def test_aten_that_fails_is_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = generate(gelu())

    def seconds(config: Config) -> float:
        if config == tune.ATEN:
            raise RuntimeError("expected scalar type Float but found BFloat16")
        return 1.0

    monkeypatch.setattr("triton.testing.do_bench", times_by(seconds))
    choice = tune.fastest_config(kernel, lambda config: lambda: config)
    assert choice.config == kernel.configs[0]
    assert choice.failures == ("ATen: RuntimeError expected scalar type Float but found BFloat16",)


def test_kernel_of_which_nothing_runs_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(config: Config) -> float:
        raise RuntimeError("no driver")

    monkeypatch.setattr("triton.testing.do_bench", times_by(seconds))
    with pytest.raises(RuntimeError, match="ATen: RuntimeError no driver"):
        tune.fastest_config(generate(gelu()), lambda config: lambda: config)


class Ranks:
    """Two ranks that agree: the second takes what the first chose."""

    def __init__(self) -> None:
        self.chosen: list[Config] = []
        self.asked = 0

    def first(self, choose: Callable[[], Config]) -> Config:
        self.asked += 1
        self.chosen.append(choose())
        return self.chosen[-1]

    def second(self, choose: Callable[[], Config]) -> Config:
        self.asked += 1
        return self.chosen[-1]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kernel, Config]]:
    """What is made ready to launch, on a machine that seems to have a GPU."""
    found: list[tuple[Kernel, Config]] = []

    def ready(
        kernel: Kernel, config: Config, device: torch.device, queue: PartsQueue | None
    ) -> Callable[..., Any]:
        found.append((kernel, config))
        return lambda tensors: ()

    monkeypatch.setattr(launching, "Launch", ready)
    monkeypatch.setattr(launching, "_runs_kernels", lambda device: True)
    return found


def test_ranks_take_the_configuration_of_the_first(
    launched: list[tuple[Kernel, Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    mine = FusedCall(gelu(), agreed=ranks.first)
    theirs = FusedCall(gelu(), agreed=ranks.second)
    kernel = generate(gelu())
    monkeypatch.setattr(mine, "_measured", lambda kernel, tensors: kernel.configs[2])
    monkeypatch.setattr(theirs, "_measured", lambda kernel, tensors: kernel.configs[1])
    x = torch.randn(4, 8)
    for call in (mine, theirs):
        call(x, x[0], x)
        call(x.t().contiguous().t(), x[0], x)  # other strides: another kernel, the same choice
        call(x, x[0], x)
    assert ranks.asked == 2
    assert [config for _, config in launched] == [kernel.configs[2]] * 4


def test_one_launch_is_made_ready_for_all_calls(
    launched: list[tuple[Kernel, Config]],
) -> None:
    call = FusedCall(gelu())
    x = torch.randn(4, 8)
    for _ in range(5):
        call(x, x[0], x)
    assert len(launched) == 1


# Settings


def test_precision_is_read_however_it_was_set() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            _ = matmul.allow_tf32  # what was read before
        assert product_precision() == "tf32"
        matmul.fp32_precision = "ieee"
        assert product_precision() == "ieee"
        matmul.allow_tf32 = True
        assert product_precision() == "tf32"
        matmul.allow_tf32 = False
        assert product_precision() == "ieee"
    finally:
        matmul.fp32_precision = before


# Regions at the edges


NO_INPUTS = """
    %a = aten.full(fill_value = 1.0) : tensor<8x8xf32>
    %b = aten.mul.Scalar(%a, other = 0.5) : tensor<8x8xf32>
    %c = aten.add.Scalar(%b, other = 1) : tensor<8x8xf32>
    output %c
"""


def test_region_without_inputs_runs_on_the_device_of_its_step() -> None:
    (found,) = FusedCall(fused(NO_INPUTS), "cpu")()
    torch.testing.assert_close(found, torch.full((8, 8), 1.5))


def test_columns_are_in_the_grid_s_only_dim() -> None:
    text = """
        input %g : tensor<64x8388608xf16>
        %s = aten.neg(%g) : tensor<64x8388608xf16>
        %b = aten.sum.dim_IntList(%s, dim = [0]) : tensor<8388608xf16>
        output %b
    """
    kernel = generate(fused(text))
    for config in kernel.configs:
        grid = grid_of(kernel, config)
        blocks = -(-8388608 // config["BLOCK_C"])
        assert blocks > 65535
        assert grid == (blocks * num_partial(kernel.region.space, config),)
    assert "tl.program_id(1)" not in kernel.source


def test_places_beyond_32_bits_are_computed_in_64() -> None:
    op = region(POINTWISE["bias, gelu and residual"], 300, 8, 1, torch.float16)
    near = generate(op, [(8, 1), (1,), (8, 1)])
    far = generate(op, [(2**23, 1), (1,), (8, 1)])
    assert "tl.int64" not in near.source
    assert "x.to(tl.int64) // 8) * 8388608" in far.source


def test_gradient_of_a_norm_without_those_of_its_weights_covers_all_rows() -> None:
    text = """
        input %g : tensor<1000x8xf32>
        input %x : tensor<1000x8xf32>
        input %m : tensor<1000x1xf32>
        input %r : tensor<1000x1xf32>
        input %w : tensor<8xf32>
        %d, %dw, %db = aten.native_layer_norm_backward(%g, %x, %m, %r, %w, %w, output_mask = [true, true, true]) : tensor<1000x8xf32>, tensor<8xf32>, tensor<8xf32>
        output %d
    """
    kernel = generate(fused(text))
    assert not kernel.partial
    assert not kernel.region.space.reduces_columns
    for config in kernel.configs:
        assert grid_of(kernel, config)[0] * config["BLOCK_R"] >= 1000


def test_kernels_with_lookups_stop_at_indices_out_of_range() -> None:
    kernel = generate(region(ROWS["cross-entropy"], 4, 8, 1, torch.float32))
    assert kernel.asserts
    assert "tl.device_assert(inside_" in kernel.source
    assert launching.launch_options(kernel, {"num_warps": 4, "BLOCK_R": 1}) == {
        "num_warps": 4, "enable_fp_fusion": True, "debug": True, "sanitize_overflow": False,
    }  # fmt: skip
    plain = generate(region(COLUMNS["gradient of a bias"], 4, 8, 1, torch.float32))
    assert launching.launch_options(plain, {"num_warps": 4}) == {
        "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip


def test_hand_written_region_with_an_op_that_no_kernel_holds_runs_on_aten() -> None:
    text = """
        input %x : tensor<2x2x2xf32>
        %e = aten.exp(%x) : tensor<2x2x2xf32>
        %a = aten.amax(%e, dim = [1], keepdim = false) : tensor<2x2xf32>
        output %a
    """
    call = FusedCall(fused(text))
    assert call.reason == "aten.amax cannot be in a generated kernel"
    x = torch.randn(2, 2, 2)
    torch.testing.assert_close(call(x)[0], x.exp().amax(1))


def test_loss_of_a_large_vocabulary_reads_the_logits_twice_and_writes_once() -> None:
    """Once for the largest and the sum of exponentials, once to store the log-probabilities."""
    kernel = generate(region(ROWS["cross-entropy"], 4, 20000, 1, torch.float32))
    assert kernel.source.count("for start in range(0, n_cols, BLOCK_C):") == 2


@pytest.mark.parametrize(
    ("dtype", "compared"),
    [
        ("f64", "x_1 > 0.1 "),
        ("f32", "x_1 > 0.10000000149011612 "),
        ("i64", "x_1.to(tl.float32) > 0.1 "),
    ],
)
def test_number_is_compared_in_the_dtype_in_which_torch_does(dtype: str, compared: str) -> None:
    text = f"""
        input %x : tensor<8x8x{dtype}>
        %y = aten.gt.Scalar(%x, other = 0.1) : tensor<8x8xi1>
        output %y
    """
    assert compared in generate(fused(text)).source
