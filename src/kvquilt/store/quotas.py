"""Bytes of a tier that are a namespace's own: what it may take, and from whom room is made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quotas:
    """What each namespace may take of a local tier.

    Beyond its quota a namespace's own least useful segments go, so what is within its quota goes for nobody else's
    sake. Namespaces without a quota may take nothing, and what they have goes first.

    Attributes:
        bytes: by namespace.
    """

    bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def within(self, budget: int | None) -> Quotas:
        """These, or in proportion less where all together are more than `budget`."""
        total = self.total
        if budget is None or total <= budget:
            return self
        return Quotas({space: size * budget // total for space, size in self.bytes.items()})

    def relief(
        self, taken: Mapping[str, int], free: Mapping[str, int], space: str, more: int, budget: int | None
    ) -> dict[str, int] | None:
        """How many bytes must go of which namespace, so that `space` can take `more` (less than 0: give back).

        Args:
            taken: bytes by namespace; what `more` replaces is among them.
            free: bytes of them that may go: nobody holds them.

        Returns:
            None where it takes more than its quota, or what would have to go is held.
        """
        quota = self.bytes.get(space, 0)
        own = max(0, taken.get(space, 0) + more - quota)
        if own > free.get(space, 0):
            return None
        plan = {space: own}
        needed = 0 if budget is None else sum(taken.values()) + more - budget - own
        # only where quotas shrank, or others put here: by what they are over, the most first
        over = {each: size - self.bytes.get(each, 0) for each, size in taken.items() if each != space}
        for each in sorted(over, key=lambda name: (-over[name], name)):
            if needed <= 0:
                break
            plan[each] = max(0, min(needed, over[each], free.get(each, 0)))
            needed -= plan[each]
        if needed > 0:
            plan[space] += needed
        if plan[space] > free.get(space, 0):
            return None
        return {each: size for each, size in plan.items() if size > 0}


Quoting = Callable[[], Quotas]  # asked for every segment that is put: tenants come and go
