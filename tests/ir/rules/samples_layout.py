"""Sample calls of the ops that move data: views, slices, concatenations, lookups, factories."""

from __future__ import annotations

import torch

from shardweave.ir.library.philox import RANDOM, random_state
from shardweave.tests.ir.rules.sharded_op import sample
from shardweave.tests.ir.rules.tensors import booleans, integers, normal, permutation, positions

VIEWS = (
    sample("view", normal(4, 6), [24]),
    sample("view", normal(24), [4, 1, 6]),
    sample("view", normal(4, 6, 8), [24, 8]),
    sample("view", normal(4, 12), [2, 24]),
    sample("view", normal(6, 4), [4, 6]),
    sample("view", normal(5, 4, 6), [5, 6, 4]),
    sample("view", normal(2, 12, 6), [2, 12, 2, 3]),
    sample("view", booleans(4, 6), [2, 12]),
    sample("permute", normal(2, 4, 6), [2, 0, 1]),
    sample("expand", normal(1, 6), [4, 6]),
    sample("expand", normal(6), [4, 2, 6]),
    sample("expand", normal(4, 1), [-1, 6]),
    sample("repeat", normal(4, 1, 6), [2, 1, 3, 3]),
    sample("flip", normal(4, 6), [1]),
    sample("roll", normal(4, 6), [2], [0]),
    sample("roll", normal(4, 6), [2]),
    sample("tril", normal(2, 4, 6)),
    sample("triu", normal(2, 4, 6), 1),
    sample("view_as_complex", normal(4, 6, 2)),
    sample("view_as_complex", normal(2)),
    sample("view_as_real", torch.view_as_complex(normal(4, 6, 2))),
)

SLICES = (
    sample("slice.Tensor", normal(12, 4), 0, 0, 6),
    sample("slice.Tensor", normal(12, 4), 0, 6, 12),
    sample("slice.Tensor", normal(4, 24), -1, 12, 24),
    sample("slice.Tensor", normal(24, 4), 0, 4, 12),
    sample("slice.Tensor", normal(24, 4), 0, 3, 11),
    sample("slice.Tensor", normal(24, 4), 0, 1, 24, 2),
    sample("slice.Tensor", normal(24, 4), 0, 2, 24, 2),
    sample("slice.Tensor", normal(24, 4), 0, 3, 24, 4),
    sample("slice.Tensor", normal(4, 6), 0, 0, 4),
    sample("slice.Tensor", normal(4, 6), 1, None, 3),
    sample("slice_backward", normal(4, 8), [4, 24], 1, 8, 16, 1),
    sample("slice_backward", normal(4, 6), [4, 24], 1, 18, 24, 1),
    sample("slice_backward", normal(12, 4), [24, 4], 0, 1, 24, 2),
    sample("slice_scatter", normal(4, 6), normal(4, 2), 1, 1, 3),
    sample("select.int", normal(2, 4, 6), -2, 1),
    sample("select_backward", normal(2, 6), [2, 4, 6], 1, 3),
    sample("select_scatter", normal(4, 6), normal(4), 1, 2),
    sample("cat", [normal(4, 6), normal(4, 6)], -1),
    sample("cat", [normal(4, 6), normal(2, 6), normal(6, 6)], 0),
    sample("cat", [normal(3, 6), normal(2, 6)]),
    sample("cat", [normal(0), normal(2, 6)]),
    sample("stack", [normal(4, 6), normal(4, 6)], 1),
    sample("constant_pad_nd", normal(4, 6), [0, 0, 1, 2]),
    sample("constant_pad_nd", normal(4, 6), [-1, 2], 1.5),
)

FACTORIES = (
    sample("full", [4, 6], 2.5, dtype=torch.float64),
    sample("full", [], 1, dtype=torch.int64),
    sample("arange.start_step", 0, 12, dtype=torch.int64),
    sample("arange.start_step", 3, -21, -2, dtype=torch.int64),
    sample("arange.start_step", 1, 13, dtype=torch.float64),
    sample("arange.start_step", 0, 12, dtype=torch.int32),
    sample("arange.start_step", 0.0, 1.2, 0.1, dtype=torch.float64),
    sample(RANDOM, random_state(1), positions(4, 6, 8), draw=2, dtype=torch.float32),
    sample(
        RANDOM, random_state(1), positions(6, 8), draw=0, distribution="bits", dtype=torch.int64
    ),
)

LOOKUPS = (
    sample("embedding", normal(12, 6), integers(2, 4, high=12)),
    sample("embedding", normal(12, 6), integers(2, 4, high=12).int()),
    sample("embedding", normal(12, 6), integers(high=12).int()),
    sample("embedding_dense_backward", normal(2, 4, 6), integers(2, 4, high=12), 12, -1, False),
    sample("embedding_dense_backward", normal(2, 4, 6), integers(2, 4, high=12), 12, 7, False),
    sample("embedding_dense_backward", normal(2, 4, 6), integers(2, 4, high=12), 12, -1, True),
    sample("gather", normal(4, 12), 1, integers(4, 6, high=12)),
    sample("gather", normal(4, 12), 1, integers(2, 6, high=12)),
    sample("gather", booleans(4, 12), -1, integers(4, 6, high=12)),
    sample("gather", integers(4, 12), 1, integers(4, 1, high=12)),
    sample("scatter_add", normal(4, 12), 1, integers(4, 6, high=12), normal(4, 6)),
    sample("scatter_add", normal(4, 12), 1, integers(4, 6, high=12), normal(6, 6)),
    sample("scatter.src", normal(4, 12), 1, permutation(12).view(2, 6), normal(4, 6)),
    sample("scatter.src", normal(4, 12), -1, permutation(12).expand(4, 12), normal(4, 12)),
    sample("scatter.value", normal(4, 12), 1, integers(4, 1, high=12), -1.0),
    sample("index_select", normal(4, 12), 1, integers(6, high=12)),
    sample("index_select_backward", normal(4, 6), [4, 12], 1, integers(6, high=12)),
    sample("index.Tensor", normal(4, 5, 6), [integers(2, high=4)]),
    sample("index.Tensor", normal(4, 5, 6), [None, integers(2, high=5) - 3]),
    sample("index.Tensor", normal(4, 5, 6), [None, integers(2, high=5), integers(2, high=6)]),
    sample("index.Tensor", normal(4, 5, 6), [integers(2, high=4), None, integers(2, high=6)]),
    sample("index.Tensor", normal(4, 6), [integers(2, 1, high=4), integers(6, high=6)]),
    sample("index.Tensor", normal(4, 6), [integers(high=4)]),
    sample("index_put", normal(4, 5, 6), [None, permutation(5)[:2]], normal(4, 2, 6)),
    sample("index_put", normal(4, 5, 6), [None, integers(3, high=5)], normal(6), True),
    sample("index_put", normal(4, 6), [integers(3, high=4)], normal(), True),
)

OF_ONE_DIM = (
    sample("diagonal_copy", normal(4, 6, 4)),
    sample("diagonal_copy", normal(4, 6, 4), 1, -1, 0),
    sample("diagonal_copy", normal(4, 4)),
    sample("diag_embed", normal(4, 6)),
    sample("diag_embed", normal(4, 6), -1, 0, 2),
    sample("diagonal_backward", normal(6, 4), [4, 6, 4], 0, 0, 2),
    sample("unfold_copy", normal(4, 6), 1, 2, 1),
    # Sums of terms are exact, since a last bit would be seen.
    sample("view.dtype", integers(4, 6).double(), torch.int64),
    sample("view.dtype", integers(4, 6).double(), torch.int32),
    sample("unfold_backward", normal(4, 5, 2), [4, 6], 1, 2, 1),
    sample("rot90", normal(4, 6, 4), 1, [1, 2]),
    sample("index_add", normal(4, 6), 1, integers(3, high=6), normal(4, 3)),
    sample("index_copy", normal(4, 6), 1, permutation(6)[:3], normal(4, 3)),
    sample("index_reduce", normal(4, 6), 1, integers(3, high=6), normal(4, 3), "amax"),
    sample("index_fill.int_Scalar", normal(4, 6), 0, integers(2, high=4), 1.5),
    sample("index_fill.int_Tensor", normal(4, 6), -1, integers(2, high=6), normal()),
    sample("scatter_reduce.two", normal(4, 6), 1, integers(4, 3, high=6), normal(4, 3), "mean"),
    sample("scatter_reduce.two", normal(4, 6), 0, integers(2, 6, high=4), normal(2, 6), "amax"),
    sample("scatter.reduce", normal(4, 6), 1, integers(4, 3, high=6), normal(4, 3), reduce="add"),
    sample("isin.Tensor_Tensor", integers(4, 6, high=5), integers(2, 2, high=5)),
    sample("searchsorted.Tensor", normal(5).sort().values, normal(4, 6)),
    sample("searchsorted.Tensor", normal(4, 5).sort().values, normal(4, 6)),
    sample("renorm", normal(4, 6, 2), 2, -2, 0.5),
    sample("scatter.value_reduce", normal(4, 6), 1, integers(4, 3, high=6), 0.5, reduce="add"),
    sample("segment_reduce", normal(6, 4), "sum", lengths=torch.tensor([2, 3, 1])),
    sample(
        "_segment_reduce_backward",
        normal(3, 4),
        normal(3, 4),
        normal(6, 4),
        "sum",
        lengths=torch.tensor([2, 3, 1]),
    ),
    sample("bucketize.Tensor", normal(4, 6), torch.linspace(-1, 1, 5, dtype=torch.float64)),
)

LAYOUT = (*VIEWS, *SLICES, *FACTORIES, *LOOKUPS, *OF_ONE_DIM)
