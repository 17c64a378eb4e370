"""The ops that random regions are drawn from, by kind: all that a kernel may hold (`ir.ops.fusible`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardweave.backends.triton.source.formulas import computed_in, rounded
from shardweave.ir.dialects.aten import overload_named
from shardweave.tests.backends.random_regions import (
    FLOATS,
    NAMES,
    SIZES,
    RandomRegion,
    Run,
    Value,
    widened,
)

SCALARS = (0.1, -0.1, 0.5, 2, 3, 1.0, -1.5, 0.0, 7, -0.0)

UNARY = """abs cos exp gelu log neg reciprocal relu rsqrt sigmoid silu sin sqrt tanh bitwise_not
logical_not""".split()
BINARY = """add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum eq.Tensor ne.Tensor lt.Tensor
le.Tensor gt.Tensor ge.Tensor bitwise_and.Tensor bitwise_or.Tensor logical_and logical_or
gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward""".split()
WITH_SCALAR = "add sub mul div eq ne lt le gt ge".split()
COMPARISONS = "eq ne lt le gt ge".split()
EXPONENTS = (-3, -2, -1, -0.5, 0.5, 1, 2, 3, 4)


def _unary(r: RandomRegion) -> bool:
    name, x = r.random.choice(UNARY), r.pick()
    return _gelu(r, x) if name == "gelu" else r.call(name, [x])


def _gelu(r: RandomRegion, x: Value, grad: Value | None = None) -> bool:
    """It, or its gradient; far below 0 it is a difference of almost equal terms.

    Computed in float64, since of infinities torch's float32 kernels make NaN.
    """
    form = r.random.choice(("none", "tanh"))
    name = "gelu" if grad is None else "gelu_backward"
    overload = overload_named(f"aten.{name}")

    def run(t: list[Tensor], own: bool) -> Tensor:
        if own or not t[0].is_floating_point():
            return overload(*t, approximate=form)
        return overload(*(one.double() for one in t), approximate=form).to(t[0].dtype)

    operands = [x] if grad is None else [grad, x]
    text = f'approximate = "{form}"'
    return _is_one_dtype(operands) and r.apply(f"aten.{name}", operands, run, text, _gelu_terms)


def _gelu_terms(*operands: Tensor) -> Tensor:
    *grad, x = operands
    return grad[0] * (1 + x.square()) if grad else x


def _is_one_dtype(values: Sequence[Value]) -> bool:
    return len({value.own.dtype for value in values}) == 1


def _binary(r: RandomRegion) -> bool:
    name = r.random.choice(BINARY)
    a, b = r.pick(), r.pick()
    if name == "gelu_backward":
        return _gelu(r, b, a)
    if name == "threshold_backward":
        return r.call(name, [a, b], 0.5, attributes="threshold = 0.5")
    if name in ("add.Tensor", "sub.Tensor") and r.random.random() < 0.3:
        overload = overload_named(f"aten.{name}")
        run = lambda t, own: overload(*t, alpha=2)  # noqa: E731
        return r.apply(f"aten.{name}", [a, b], run, "alpha = 2")
    return r.call(name, [a, b])


def _with_scalar(r: RandomRegion) -> bool:
    word, x = r.random.choice(WITH_SCALAR), r.pick()
    other = r.random.choice(SCALARS)
    if not x.is_float and isinstance(other, float) and word in ("add", "sub", "mul"):
        other = 3
    if x.own.dtype == torch.uint8 and other < 0:  # torch's own rule for this changes
        other = 2
    overload, dtype = overload_named(f"aten.{word}.Scalar"), x.own.dtype

    def run(t: list[Tensor], own: bool) -> Tensor:
        is_rounded = not own and word in COMPARISONS and dtype.is_floating_point
        return overload(t[0], rounded(other, dtype) if is_rounded else other)

    return r.apply(f"aten.{word}.Scalar", [x], run, f"other = {_number(other)}")


def _whole_quotient(r: RandomRegion) -> bool:
    x = r.pick(floats=False)
    other, mode = r.random.choice((1, 2, 3, 7)), r.random.choice(("floor", "trunc"))
    overload = overload_named("aten.div.Scalar_mode")
    run = lambda t, own: overload(t[0], other, rounding_mode=mode)  # noqa: E731
    text = f'other = {other}, rounding_mode = "{mode}"'
    return x.own.dtype != torch.bool and r.apply("aten.div.Scalar_mode", [x], run, text)


def _power(r: RandomRegion) -> bool:
    exponent = r.random.choice(EXPONENTS)
    return r.call(
        "pow.Tensor_Scalar", [r.pick()], exponent, attributes=f"exponent = {_number(exponent)}"
    )


def _masked(r: RandomRegion) -> bool:
    masks = [v for v in r.values if v.own.dtype == torch.bool]
    mask = r.random.choice(masks) if masks else r.new_input(r.broadcastable(), torch.bool)
    x = r.pick()
    if r.random.random() < 0.5:
        return r.call("where.self", [mask, x, r.pick()])
    value = r.random.choice((0.1, -1.0, 2.0)) if x.is_float else 2
    overload = overload_named("aten.masked_fill.Scalar")
    run = lambda t, own: overload(*t, rounded(value, x.own.dtype))  # noqa: E731
    return r.apply("aten.masked_fill.Scalar", [x, mask], run, f"value = {_number(value)}")


def _full(r: RandomRegion) -> bool:
    dtype = r.random.choice((r.dtype, torch.int64, torch.bool))
    value = r.random.choice((0.1, 0.0, 1.0, -2.0)) if dtype.is_floating_point else 1
    shape = r.random.choice(((), r.shape, (1,)))

    def run(t: list[Tensor], own: bool) -> Tensor:
        made = torch.full(shape, value, dtype=dtype)
        return made if own else widened(made)

    return r.apply("aten.full", [], run, f"fill_value = {_number(value, dtype)}")


def _range(r: RandomRegion) -> bool:
    dtype = r.random.choice((torch.int64, torch.int32))
    start, stride, count = r.random.choice((0, -3, 5)), r.random.choice((1, 3)), r.shape[-1]

    def run(t: list[Tensor], own: bool) -> Tensor:
        return torch.arange(start, start + stride * count, stride, dtype=dtype)

    return r.apply("aten.arange.start_step", [], run, f"start = {start}, step = {stride}")


def _cast(r: RandomRegion) -> bool:
    x = r.pick()
    goal = r.random.choice((*FLOATS, torch.int64, torch.int32, torch.bool))
    if x.is_float and not goal.is_floating_point and goal != torch.bool:
        finite = bool(x.wide.isfinite().all()) and bool((x.wide.abs() < 2**20).all())
        if x not in r.inputs or not finite:
            return False
    run = lambda t, own: t[0].to(goal if own else computed_in(goal))  # noqa: E731
    return r.apply("aten._to_copy", [x], run)


def _view(r: RandomRegion) -> bool:
    x = r.pick()
    kind = r.random.choice(("view", "permute", "expand"))
    if kind == "permute" and len(x.shape) > 1:
        dims = list(range(len(x.shape)))
        r.random.shuffle(dims)
        return r.apply("aten.permute", [x], lambda t, own: t[0].permute(dims), f"dims = {dims}")
    if kind == "expand":
        return r.apply("aten.expand", [x], lambda t, own: t[0].expand(r.shape))
    numel = math.prod(x.shape)
    divisors = [n for n in range(1, numel + 1) if numel % n == 0]
    first = r.random.choice(divisors)
    shape = r.random.choice(((numel,), (first, numel // first), (*x.shape, 1), r.shape))
    return r.apply("aten.view", [x], lambda t, own: t[0].reshape(shape))


def _part(r: RandomRegion) -> bool:
    x = r.pick()
    if not x.shape:
        return False
    dim = r.random.randrange(len(x.shape))
    size = x.shape[dim]
    start = r.random.randrange(size)
    end = r.random.randint(start + 1, size)
    kind = r.random.choice(("slice", "select", "slice_backward", "select_backward"))
    if kind == "slice":
        run = lambda t, own: t[0].narrow(dim, start, end - start)  # noqa: E731
        return r.apply("aten.slice.Tensor", [x], run, f"dim = {dim}, start = {start}")
    if kind == "select":
        run = lambda t, own: t[0].select(dim, start)  # noqa: E731
        return r.apply("aten.select.int", [x], run, f"dim = {dim}, index = {start}")
    if kind == "slice_backward":
        shape = [*x.shape[:dim], size + start + 2, *x.shape[dim + 1 :]]
        overload = overload_named("aten.slice_backward")
        run = lambda t, own: overload(t[0], shape, dim, start, start + size, 1)  # noqa: E731
        text = f"dim = {dim}, start = {start}, step = 1"
        return r.apply("aten.slice_backward", [x], run, text)
    shape = [*x.shape[:dim], start + 2, *x.shape[dim:]]
    overload = overload_named("aten.select_backward")
    run = lambda t, own: overload(t[0], shape, dim, start)  # noqa: E731
    return r.apply("aten.select_backward", [x], run, f"dim = {dim}, index = {start}")


def _pad(r: RandomRegion) -> bool:
    x = r.pick()
    if not x.shape:
        return False
    dim = r.random.randrange(len(x.shape))
    pad = [0, 0] * (len(x.shape) - 1 - dim) + r.random.choice(([1, 0], [0, 2], [2, 3]))
    value = r.random.choice((0.0, 1.0, -2.0)) if x.is_float else r.random.choice((0, 1))
    overload = overload_named("aten.constant_pad_nd")
    run = lambda t, own: overload(t[0], pad, value)  # noqa: E731
    return r.apply("aten.constant_pad_nd", [x], run, f"pad = {pad}, value = {_number(value)}")


def _cat(r: RandomRegion) -> bool:
    a = r.pick()
    if not a.shape:
        return False
    dim = r.random.randrange(len(a.shape))
    others = [v for v in r.values if v.own.dtype == a.own.dtype and len(v.shape) == len(a.shape)]
    parts = [a, r.random.choice(others)]
    return r.apply("aten.cat", parts, lambda t, own: torch.cat(t, dim), f"dim = {dim}")


def _lookup(r: RandomRegion) -> bool:
    kind = r.random.choice(("embedding", "gather", "scatter_add"))
    num, rows = r.random.choice(SIZES), r.shape[0]
    shape = (rows,) if kind == "embedding" else (rows, 1)
    index = torch.randint(0, num, shape, generator=r.generator)
    places = r.new_input(index.shape, torch.int64, index)
    table = r.new_input((num, r.shape[-1]) if kind == "embedding" else (rows, num), r.dtype)
    if kind == "embedding":
        return r.call("embedding", [table, places])
    if kind == "gather":
        run = lambda t, own: t[0].gather(1, t[1])  # noqa: E731
        return r.apply("aten.gather", [table, places], run, "dim = 1")
    added = r.new_input((rows, 1), r.dtype)
    run = lambda t, own: t[0].scatter_add(1, t[1], t[2])  # noqa: E731
    return r.apply("aten.scatter_add", [table, places, added], run, "dim = 1")


def _reduction(r: RandomRegion) -> bool:
    x = r.pick()
    if not x.shape:
        return False
    name = r.random.choice(("sum.dim_IntList", "amax", "amin"))
    count = r.random.randint(1, len(x.shape))
    order = list(range(len(x.shape)))
    dims = order[-count:] if r.random.random() < 0.7 else order[:count]
    keep = r.random.random() < 0.7
    return r.call(name, [x], dims, keep, attributes=f"dim = {dims}, keepdim = {str(keep).lower()}")


def _softmax(r: RandomRegion) -> bool:
    x = r.pick(floats=True)
    last = len(x.shape) - 1
    if last < 0:
        return False
    kind = r.random.choice(("_softmax", "_safe_softmax", "_softmax_backward_data"))
    if kind == "_softmax":
        text = f"dim = {last}, half_to_float = false"
        return r.call("_softmax", [x], last, False, attributes=text)
    if kind == "_safe_softmax":
        return r.call("_safe_softmax", [x], last, attributes=f"dim = {last}")
    grad = r.new_input(x.shape, x.own.dtype)
    overload = overload_named("aten._softmax_backward_data")

    def run(t: list[Tensor], own: bool) -> Tensor:
        if own:
            return overload(*t, last, t[0].dtype)
        g, y = t  # by its formula: signs of zeros differ from kernel to kernel of torch's own
        return y * (g - (g * y).sum(-1, keepdim=True))

    text = f"dim = {last}, input_dtype = {NAMES[x.own.dtype]}"
    return r.apply("aten._softmax_backward_data", [grad, x], run, text)


def _norm(r: RandomRegion) -> bool:
    x = r.pick(floats=True)
    if not x.shape:
        return False
    width, dtype = x.shape[-1], x.own.dtype
    weight, bias = r.new_input((width,), dtype), r.new_input((width,), dtype)
    layer_norm = overload_named("aten.native_layer_norm")
    if r.random.random() < 0.5:
        run = lambda t, own: (  # noqa: E731
            layer_norm(t[0], [width], t[1], t[2], 1e-5) if own else _layer_norm(*t)
        )
        return r.apply("aten.native_layer_norm", [x, weight, bias], run, "eps = 1.0e-05")
    made = layer_norm(x.own, [width], weight.own, bias.own, 1e-5)
    mean, rstd = (r.new_input(s.shape, s.dtype, s) for s in made[1:])
    grad = r.new_input(x.shape, dtype)
    backward = _on_dense(overload_named("aten.native_layer_norm_backward"))
    mask = r.random.choice(([True, True, True], [True, False, False], [False, True, True]))

    def run(t: list[Tensor], own: bool) -> Any:
        if own:
            return backward(*t[:2], [width], *t[2:], mask)
        return _norm_gradients(t[0], t[1], t[2], t[3], t[4], mask)

    text = f"output_mask = [{', '.join(str(b).lower() for b in mask)}]"
    return r.apply(
        "aten.native_layer_norm_backward", [grad, x, mean, rstd, weight, bias], run, text
    )


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """By its formula: for rows with infinities torch's own kernels differ."""
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (x - mean).square().sum(-1, keepdim=True) / x.shape[-1]
    rstd = 1 / (variance + 1e-5).sqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


def _norm_gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, mask: Sequence[bool]
) -> list[Tensor]:
    normal, weighted = (x - mean) * rstd, grad * weight
    tilt, shift = (weighted * normal).sum(-1, keepdim=True), weighted.sum(-1, keepdim=True)
    rows = tuple(range(x.ndim - 1))
    sums = [(grad * normal).sum(rows), grad.sum(rows)] if rows else [grad * normal, grad]
    sums = [one + 0.0 for one in sums]  # also of one row they begin with 0
    found = [(weighted - (normal * tilt + shift) / x.shape[-1]) * rstd, *sums]
    return [one for one, is_wanted in zip(found, mask, strict=True) if is_wanted]


def _on_dense(overload: Run) -> Run:
    """The CPU's kernel of a norm's gradient reads strided operands as if they were dense."""
    return lambda *args: overload(*(a.contiguous() if isinstance(a, Tensor) else a for a in args))


def _product(r: RandomRegion) -> bool:
    """A product of the region's shape, of inputs or of a pointwise op's result, once."""
    rows, columns, inner = r.shape[0], r.shape[-1], r.random.choice(SIZES)
    left, right = r.new_input((rows, inner), r.dtype), r.new_input((inner, columns), r.dtype)
    if r.random.random() < 0.3 and r.call(r.random.choice(("neg", "silu", "relu")), [left]):
        left = r.values[-1]
    factors, dtype = [left, right], r.dtype
    if r.random.random() < 0.5:
        factors.insert(0, r.new_input(r.random.choice(((columns,), (rows, columns))), dtype))
    name = "addmm" if len(factors) == 3 else "mm"
    overload = overload_named(f"aten.{name}")

    def run(t: list[Tensor], own: bool) -> Tensor:
        *bias, a, b = t
        # Tensor cores multiply halves as they are, and add to 0: no sum of products is -0.0.
        return overload(*bias, *(f.to(dtype).to(f.dtype) for f in (a, b))) + 0.0

    return r.apply(f"aten.{name}", factors, run)


def _lookup_gradient(r: RandomRegion) -> bool:
    """Rows of an input, or of a pointwise op's result, added up by index and mostly to a table."""
    count, rows, width = (r.random.choice(SIZES) for _ in range(3))
    gradient = r.new_input((count, width), r.dtype)
    index = torch.randint(0, rows, (count,), generator=r.generator)
    places, table = r.new_input((count,), torch.int64, index), r.new_input((rows, width), r.dtype)
    if r.random.random() < 0.3 and r.call(r.random.choice(("neg", "silu", "relu")), [gradient]):
        gradient = r.values[-1]
    padding = r.random.choice((-1, 0, rows - 1))
    overload = overload_named("aten.embedding_dense_backward")
    run = lambda t, own: overload(*t, rows, padding, False)  # noqa: E731
    text = f"padding_idx = {padding}, scale_grad_by_freq = false"
    if not r.apply("aten.embedding_dense_backward", [gradient, places], run, text):
        return False
    if rows >= count and r.random.random() < 0.3:
        return True
    operands = [r.values[-1], table]
    r.random.shuffle(operands)
    return r.call("add.Tensor", operands)


def _number(value: float, dtype: torch.dtype | None = None) -> str:
    if dtype == torch.bool:
        return str(bool(value)).lower()
    return repr(value)


KINDS: dict[str, tuple[tuple[Callable[[RandomRegion], bool], float], ...]] = {
    "pointwise": (
        (_unary, 6), (_binary, 6), (_with_scalar, 4), (_power, 1), (_masked, 2), (_full, 1),
        (_cast, 2), (_view, 2), (_part, 2), (_cat, 1), (_lookup, 1), (_range, 1), (_pad, 1),
        (_whole_quotient, 1),
    ),
    "reducing": (
        (_unary, 4), (_binary, 5), (_with_scalar, 2), (_power, 1), (_masked, 1), (_cast, 1),
        (_reduction, 4), (_softmax, 3), (_norm, 2), (_lookup, 1), (_full, 1), (_view, 1),
        (_range, 0.5), (_pad, 0.5), (_whole_quotient, 0.5),
    ),
    "lookups": (),
    "product": ((_unary, 3), (_binary, 3), (_with_scalar, 1), (_masked, 1), (_cast, 1)),
}  # fmt: skip


def random_region(seed: int) -> RandomRegion:
    """A region of one to eight ops; one in eight has a matrix product, with ops after it, and one in
    17 the gradient of a lookup."""
    region = RandomRegion(seed)
    kind = region.random.choices(tuple(KINDS), (7, 7, 1, 2))[0]
    if kind == "lookups":
        _lookup_gradient(region)
        return region
    if kind == "product":
        region.shape = tuple(region.random.choice(SIZES) for _ in range(2))
        region.dtype = region.random.choice((torch.float32, torch.bfloat16, torch.float16))
        _product(region)
    makers, weights = zip(*KINDS[kind], strict=True)
    goal = region.random.randint(1, 8)
    for _ in range(4 * goal):
        if len(region.steps) < goal and len(region.inputs) < 12:
            region.random.choices(makers, weights)[0](region)
    return region
