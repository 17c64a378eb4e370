"""Random numbers, and calls that have no exact sharded form yet, which are refused."""

from __future__ import annotations

from shardweave.ir.capture.canonical.base import DRAWS, Call, CanonicalError, Result, form
from shardweave.ir.capture.draws import RECIPES, Draw, is_in_place


@form("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim")
def _data_dependent(call: Call) -> Result:
    raise CanonicalError(
        f"{call.name} gives a result whose shape or value steers the program by the data; "
        "write the model with masks of fixed shape instead."
    )


NO_RECIPE = (
    "draws random numbers in a way that has no form in a program; draw by torch.rand, randn, "
    "bernoulli, randint, randperm or nn.Dropout, or outside the model and pass them as an input"
)


@form(*(name for name in RECIPES if not is_in_place(name)))
def _random(call: Call) -> Result:
    if call.arguments.get("generator") is not None:
        raise CanonicalError(
            f"{call.name} draws from a generator of its own, whose state a program does not have; "
            "leave generator= out, and give sw.compile a seed."
        )
    return RECIPES[call.name](Draw(call.builder, call.arguments, call.shape, call.dtype))


@form(DRAWS, "aten.rrelu_with_noise")
def _refused(call: Call) -> Result:
    raise CanonicalError(f"{call.name} {NO_RECIPE}.")
