"""The best estimates, simulated: which of AMP's strategies is the fastest event by event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardweave.planners.amp.search import Placed
from shardweave.planners.cost.timeline import seconds_text
from shardweave.planners.plan import Plan
from shardweave.planners.plan_parts import Candidate, Predicted
from shardweave.planners.predict import fits, why_slower, with_candidates


@dataclass(frozen=True)
class RankedSetup:
    """A strategy with what it is estimated to take."""

    name: str
    placed: Placed
    estimated: Predicted


@dataclass(eq=False)
class Ranking:
    """The best estimates, simulated. plans: of the first of the choices, those to simulate."""

    choices: Sequence[RankedSetup]
    plans: Sequence[Plan]
    simulate: Callable[[Plan], Predicted]
    reason: str = ""

    def best(self, top: int) -> Plan:
        """The fastest plan; the others are its candidates, those that are only estimated last."""
        rows = [
            (Candidate(choice.name, self.simulate(plan)), choice, plan)
            for choice, plan in zip(self.choices, self.plans, strict=False)
        ]
        # A sort is stable: of plans that take as long, the least estimate comes first.
        rows.sort(key=lambda row: (not fits(row[0].predicted), row[0].predicted.time_s))
        _, chosen, plan = rows[0]
        place = self.choices.index(chosen) + 1
        self.reason = (
            f"the {len(rows)} best estimates were simulated, and of those this one is the fastest "
            f"(number {place} by estimate, {seconds_text(chosen.estimated.time_s)})"
        )
        found = with_candidates(plan, [row for row, _, _ in rows][:top])
        rest = [
            Candidate(
                one.name,
                one.estimated,
                f"not simulated; by estimate {why_slower(chosen.estimated, one.estimated)}",
            )
            for one in self.choices[len(rows) : top]
        ]
        return replace(found, candidates=(*found.candidates, *rest))
