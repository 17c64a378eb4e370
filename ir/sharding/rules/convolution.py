"""Rules of convolutions and interpolation; of samplers and patches, whose spatial dims stay whole.

A convolution's channels are `(g c)` on the input's side and `(g o)` on the output's, with g
groups; g is named only where there are several. Its spatial dims are those of `windows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import part_size
from shardweave.ir.sharding.rules.base import Localize, Localizer, Notation, Rule, rule
from shardweave.ir.sharding.rules.windows import (
    Along,
    Sharded,
    gives_gradients,
    listed,
    narrower,
    sharded_of,
    stretched,
    texts,
    unpadded,
    wide_type,
    wider,
    windowed,
    windows_along,
)


@rule
def patches(op: AtenOp) -> Rule:
    """`n ... -> n ...`: only samples (n) can be sharded: patches merge channels and positions."""
    ranks = [len(shape_of(value)) for value in (*op.operands, *op.results)]
    is_batch = min(ranks) > 2
    given, made = (("n" if is_batch else ".") + " ." * (rank - 1) for rank in ranks)
    return Notation(op, f"{given} -> {made}").rule()


@rule
def convolution(op: AtenOp) -> Rule:
    """`n c (y s), o c ., o -> n o y`: shards of c give partial sums; with a bias, c stays whole. If
    transposed, y is the input's dim and (y s) the output's."""
    x, weight, *bias = op.operands
    given = ["x", "w", *("b" for _ in bias)]
    return _convolution(op, x, op.results[0], weight, given, ["y"], is_c_lost=bool(bias))


@rule
def convolution_backward(op: AtenOp) -> Rule:
    """`n o y, n c (y s), o c . -> n c (y s), o c ., o`; results that `output_mask` leaves out are
    absent.

    The input's gradient sums over o, the others over n and y. The bias gradient is complete on each
    shard of c, not a term of a sum, so c cannot be sharded if it is requested.
    """
    grad, x, weight = op.operands
    mask = op.value("output_mask")
    made = [name for name, wanted in zip("xwb", mask, strict=True) if wanted]
    return _convolution(op, x, grad, weight, ["y", "x", "w"], made, is_c_lost=mask[2])


def _convolution(
    op: AtenOp,
    x: SSAValue,
    y: SSAValue,
    weight: SSAValue,
    given: Sequence[str],
    made: Sequence[str],
    *,
    is_c_lost: bool,
) -> Rule:
    """Build the rule of a convolution or its backward. x, y: values of its input's and output's
    type. given, made: operands and results by letter: x, y, w (weight), b (bias). is_c_lost: forbid
    sharding of c."""
    turned, groups = op.value("transposed"), op.value("groups")
    lengths = shape_of(weight)[2:]
    window = [listed(op, name, len(lengths)) for name in ("stride", "padding", "dilation")]
    wide, narrow = (shape_of(value) for value in ((y, x) if turned else (x, y)))
    alongs = windows_along(wide, narrow, list(zip(lengths, *window, strict=True)))
    of_wide, of_narrow = texts(alongs, 2, len(wide))
    of_x, of_y = (of_narrow, of_wide) if turned else (of_wide, of_narrow)
    c, o = ("c", "o") if groups == 1 else ("(g c)", "(g o)")
    # A transposed convolution's weight has the input's channels first.
    channels = f"{c} o" if turned else f"{o} c"
    dims = {"x": f"n {c} {of_x}", "y": f"n {o} {of_y}", "b": o}
    dims["w"] = channels + " ." * len(lengths)
    text = " -> ".join(", ".join(dims[name] for name in side) for side in (given, made))
    is_local = groups > 1 or any(along.reach for along in alongs)
    return windowed(
        op,
        text,
        alongs,
        _on_shards if is_local else None,
        sizes={"g": groups},
        reductions={"c": None} if is_c_lost else {},
    )


@cache
def _on_shards(alongs: tuple[Along, ...]) -> Localize:
    def localize(local: Localizer) -> Sequence[SSAValue]:
        op, values = local.op, dict[str, Any]()
        groups = op.value("groups")
        if groups > 1:
            # Every text starts with `n (g ..)`, so g is factor 1.
            values["groups"] = part_size(local.placements[1], groups)
        sharded = [pair for pair in sharded_of(local, alongs) if pair[0].reach]
        if not sharded:
            return local.clone(**values)
        if not op.value("transposed"):
            values["padding"] = unpadded(local, sharded)
            return (_backward if gives_gradients(op) else _forward)(local, sharded, values)
        return (_transposed_backward if gives_gradients(op) else _transposed)(
            local, sharded, values
        )

    return localize


def _forward(local: Localizer, sharded: Sharded, values: dict[str, Any]) -> Sequence[SSAValue]:
    x, *rest = local.operands
    return local.clone([wider(local, x, sharded), *rest], **values)


def _backward(local: Localizer, sharded: Sharded, values: dict[str, Any]) -> Sequence[SSAValue]:
    """Emit one op for the input's gradient, added to the neighbours', and one for the others."""
    grad, x, weight = local.operands
    of_x, *rest = local.op.value("output_mask")
    halos = [along.halo for along, _ in sharded]
    x = wider(local, x, sharded) if rest[0] else stretched(local, x, halos)
    made: list[SSAValue] = []
    if of_x:
        mask = [True, False, False]
        made = local.clone([grad, x, weight], [x.type], output_mask=mask, **values)
        made = [narrower(local, made[0], sharded)]
    if any(rest):
        types, mask = local.types[of_x:], [False, *rest]
        made += local.clone([grad, x, weight], types, output_mask=mask, **values)
    return made


def _transposed(local: Localizer, sharded: Sharded, values: dict[str, Any]) -> Sequence[SSAValue]:
    """Read the neighbours' inputs, and cut off their outputs by more padding."""
    x, *rest = local.operands
    padding = listed(local.op, "padding", len(shape_of(x)) - 2)
    for along, placements in sharded:
        x = local.halo(x, placements, (along.dim, along.reach, along.reach))
        padding[along.dim - along.first] += along.reach * along.stride
    return local.clone([x, *rest], **values, padding=padding)


def _transposed_backward(
    local: Localizer, sharded: Sharded, values: dict[str, Any]
) -> Sequence[SSAValue]:
    """Read the neighbours' output gradients for input and weight; the bias sums its own only."""
    grad, x, weight = local.operands
    more = unpadded(local, sharded, "output_padding")
    for along, _ in sharded:
        more[along.dim - along.first] = max(0, -along.after)
    values |= {"padding": unpadded(local, sharded), "output_padding": more}
    *mask, of_bias = local.op.value("output_mask")
    made: list[SSAValue] = []
    if any(mask):
        operands, types = [wider(local, grad, sharded), x, weight], local.types[: sum(mask)]
        made = local.clone(operands, types, output_mask=[*mask, False], **values)
    if of_bias:
        type_ = local.result_shape(-1), dtype_of_value(grad)
        dims = [0, *range(2, len(shape_of(grad)))]
        made += local.emit("aten.sum.dim_IntList", [grad], type_, dim=dims)
    return made


@rule
def grid_sampler(op: AtenOp) -> Rule:
    """`n c ., n . -> n c .`: samples and channels can be sharded, planes and grid points cannot."""
    planes, places = _sampled(op)
    return Notation(op, f"{planes}, {places} -> {planes}").rule()


@rule
def grid_sampler_backward(op: AtenOp) -> Rule:
    """`n c ., n c ., n . -> n c ., n .`: shards of c give partial sums of the grid's gradient."""
    planes, places = _sampled(op)
    mask = op.value("output_mask")
    both = [planes, places]
    # The kernel always gives the gradient of places.
    kept = both if len(op.results) > 1 else [d for d, w in zip(both, mask, strict=True) if w]
    results = ", ".join(kept)
    return Notation(op, f"{planes}, {planes}, {places} -> {results}").rule()


def _sampled(op: AtenOp) -> tuple[str, str]:
    spatial = " ." * (len(shape_of(op.operands[0])) - 2)
    return f"n c{spatial}", f"n{spatial} ."


# Interpolation


@rule
def nearest(op: AtenOp) -> Rule:
    """`... (y s) -> ... (y t)`; reads no neighbours."""
    return _resized(op, lambda along: 0)


@rule
def linear(op: AtenOp) -> Rule:
    """`... (y s) -> ... (y t)`; reads one index of each neighbour if it enlarges (s = 1 < t)."""
    return _resized(op, lambda along: int(along.stride == 1 < along.times))


@rule
def cubic(op: AtenOp) -> Rule:
    """`... (y s) -> ... (y t)`; reads one block of each neighbour, or two if s = 1."""
    return _resized(op, lambda along: 0 if along.stride == along.times else 1 + (along.stride == 1))


def _resized(op: AtenOp, reach_of: Callable[[Along], int]) -> Rule:
    is_backward = gives_gradients(op)
    given, made = shape_of(op.operands[0]), shape_of(op.results[0])
    wide, narrow = (made, given) if is_backward else (given, made)
    scales = [op.value(p.name) for p in op.signature.parameters if p.name.startswith("scales")]
    corners = op.signature.parameter("align_corners") is not None and op.value("align_corners")
    rank, alongs = len(wide), list[Along]()
    for dim, scale in enumerate(() if corners else scales, rank - len(scales)):
        times, stride = max(narrow[dim] // wide[dim], 1), max(wide[dim] // narrow[dim], 1)
        is_whole = wide[dim] * times == narrow[dim] * stride and scale in (None, times / stride)
        if is_whole and min(wide[dim], narrow[dim]) > 1:
            along = Along(dim, rank - len(scales), stride, times)
            size = reach_of(along) * stride
            alongs.append(along._replace(before=size, after=size))
    pair = ["... " + text for text in texts(alongs, rank - len(scales), rank)]
    text = " -> ".join(reversed(pair) if is_backward else pair)
    reaches = any(along.reach for along in alongs)
    return windowed(op, text, alongs, _interpolated if reaches else None, even=reaches)


@cache
def _interpolated(alongs: tuple[Along, ...]) -> Localize:
    def localize(local: Localizer) -> Sequence[SSAValue]:
        sharded = [pair for pair in sharded_of(local, alongs) if pair[0].reach]
        if not sharded:
            return local.clone()
        (value,), (type_,) = local.operands, local.types
        halos = [along.halo for along, _ in sharded]
        # The halos on the narrow side.
        ends = [(a.dim, a.reach * a.times, a.reach * a.times) for a, _ in sharded]
        if gives_gradients(local.op):
            (made,) = local.clone([stretched(local, value, ends)], [wide_type(type_, halos)])
            return [narrower(local, made, sharded, "repeat")]
        value = wider(local, value, sharded, "repeat")
        (made,) = local.clone([value], [wide_type(type_, ends)])
        for dim, before, after in ends:
            shape = [*shape_of(made)]
            shape[dim] -= before + after
            type_ = shape, dtype_of_value(made)
            (made,) = local.emit("aten.slice.Tensor", [made], type_, dim=dim, start=before)
        return [made]

    return localize
