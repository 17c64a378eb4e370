"""What values relate to, as a certificate writes it."""

from __future__ import annotations

from typing import Any

from shardweave.ir.mesh.placement import Placement, Sharding
from shardweave.ir.proof.held import (
    AttentionPart,
    Coordinates,
    Cuts,
    Fill,
    Held,
    Local,
    RankNumber,
    Relation,
    Row,
    Value,
)

Json = Any
"""What `json` reads and writes."""


def written_cuts(cuts: Cuts) -> Json:
    """How each dim is cut, as JSON: axis, size and stride of each placement."""
    return [[[p.axis, p.size, p.stride] for p in cut] for cut in cuts]


def read_cuts(given: Json) -> Cuts:
    """The inverse of `written_cuts`."""
    return tuple([tuple([Placement(str(a), int(n), int(t)) for a, n, t in cut]) for cut in given])


def written_at(at: Coordinates) -> Json:
    """On which coordinates of which axes something is, as JSON."""
    return [[axis, sorted(which)] for axis, which in at]


def read_at(given: Json) -> Coordinates:
    """The inverse of `written_at`."""
    return tuple([(str(axis), frozenset(map(int, which))) for axis, which in given])


def written_claim(value: Value | None) -> Json:
    """A value as JSON; null for what a rank computes of its own."""
    if isinstance(value, Relation):
        return _written_relation(value)
    if isinstance(value, RankNumber):
        return {"position": [list(term) for term in value.terms], "plus": value.constant}
    if isinstance(value, Row):
        pieces = [[written_claim(piece), size] for piece, size in value.pieces]
        return {"row": value.dim, "pieces": pieces}
    if isinstance(value, AttentionPart):
        return {
            "part of": written_claim(value.whole),
            "results": list(value.results),
            "index": value.index,
            "axis": list(value.axis),
            "blocks": sorted(value.of),
        }
    assert value is None or isinstance(value, Local)
    return None


def _written_relation(value: Relation) -> Json:
    held, sharding = value.held, value.held.sharding
    made: dict[str, Json] = {
        "of": held.number,
        "shape": list(held.shape),
        "cut": written_cuts(sharding.dims),
    }
    if sharding.unreduced:
        made["pending"] = [sharding.reduction, *sharding.unreduced]
    if held.terms:
        made["terms"] = held.terms
    if held.layout is not None:
        made["digits"] = [[list(digit) for digit in own] for own in held.layout]
    if held.fill is not None:
        value_ = held.fill.value
        made["fill"] = [value_ if value_ == value_ and abs(value_) < 1e300 else str(value_)]
        made["fill"] += sorted(held.fill.dims)
    if value.at:
        made["at"] = written_at(value.at)
    return made


def read_claim(given: Json) -> Value | None:
    """The inverse of `written_claim`. Raises KeyError, TypeError or ValueError for other JSON."""
    if given is None:
        return None
    if "of" in given:
        return _read_relation(given)
    if "position" in given:
        terms = tuple([(str(axis), int(factor)) for axis, factor in given["position"]])
        return RankNumber(terms, int(given["plus"]))
    if "row" in given:
        pieces = [(read_claim(piece), int(size)) for piece, size in given["pieces"]]
        return Row(int(given["row"]), tuple(pieces))  # pyright: ignore[reportArgumentType]
    whole = read_claim(given["part of"])
    if not isinstance(whole, Relation):
        raise ValueError("a part of attention is one of a relation")
    name, size = given["axis"]
    results = tuple(map(int, given["results"]))
    blocks = frozenset(map(int, given["blocks"]))
    return AttentionPart(whole, results, int(given["index"]), (str(name), int(size)), blocks)


def _read_relation(given: Json) -> Relation:
    reduction, *unreduced = given.get("pending", ["sum"])
    if reduction not in ("sum", "max"):
        raise ValueError(f"there is no reduction '{reduction}'")
    sharding = Sharding(read_cuts(given["cut"]), tuple(map(str, unreduced)), reduction)
    digits = given.get("digits")
    layout = digits and tuple([tuple([(int(d), int(t), int(n)) for d, t, n in o]) for o in digits])
    value, *dims = given.get("fill", [0])
    fill = Fill(float(value), frozenset(map(int, dims))) if "fill" in given else None
    shape = tuple(map(int, given["shape"]))
    held = Held(int(given["of"]), shape, sharding, int(given.get("terms", 0)), layout, fill)
    return Relation(held, read_at(given.get("at", [])))
