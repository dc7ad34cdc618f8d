"""Time to the first token, by one rule for every arm.

The clock starts when the prompt's ids are known and its compiled segments lie in memory. Inside: placing, rotating,
copying into slots, masks, the probe, choosing, the repair pass, the first token. Outside, and never in these figures:
compiling, tokenising, reading from a disk, decoding. Arms take turns, so a machine that slows down slows them all; only
ratios within one run compare.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvquilt.errors import InputError
from kvquilt.evaluation.run.arms import FULL
from kvquilt.evaluation.run.standing import reading
from kvquilt.ledger import Ledger
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Run
from kvquilt.repair.operator import repair
from kvquilt.repair.presets import METHODS, Method

if TYPE_CHECKING:
    from kvquilt.engine import Engine

WARMUPS, REPEATS = 3, 5  # the fewest that count
PREFIX_HIT = "prefix-hit"  # the question on a cache that already holds all before it: the floor
_IN_MEMORY = {"memory"}


@dataclass(frozen=True, slots=True)
class Timing:
    """One arm's repeats, in seconds.

    Attributes:
        wall: by the clock; `processor`: time of all threads of this process, which other processes hardly change.
    """

    wall: tuple[float, ...]
    processor: tuple[float, ...]

    @property
    def median(self) -> float:
        """By the clock."""
        return statistics.median(self.wall)


def take_turns(
    arms: Mapping[str, Callable[[], object]], warmups: int = WARMUPS, repeats: int = REPEATS
) -> dict[str, Timing]:
    """Time every arm once a round; the order turns around with every round, the first `warmups` do not count.

    An arm must do the same work at the same lengths every time, and have waited for its device when it returns.

    Raises:
        InputError: no arms, fewer rounds than count.
    """
    if not arms:
        raise InputError("arms", "at least one is needed")
    for name, value, least in (("warmups", warmups, WARMUPS), ("repeats", repeats, REPEATS)):
        if value < least:
            raise InputError(name, f"must be at least {least}", value)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for n in range(warmups + repeats):
        for name in list(arms)[:: -1 if n % 2 else 1]:
            wall, processor = time.perf_counter(), time.process_time()
            arms[name]()
            processor, wall = time.process_time() - processor, time.perf_counter() - wall
            if n >= warmups:
                taken[name].append((wall, processor))
    return {name: Timing(*map(tuple, zip(*each, strict=True))) for name, each in taken.items()}


@dataclass(frozen=True, slots=True)
class ArmPrompt:
    """What one arm reads.

    Attributes:
        ranking: the indices of its documents, the retriever's best first; empty where the method asks none.
        in_parts: two forwards, see `kvquilt.evaluation.run.standing.reading`.
    """

    method: Method
    runs: Sequence[Run] = field(repr=False)
    ranking: Sequence[int] = ()
    in_parts: bool = False


def first_tokens(
    engine: Engine,
    prompts: Mapping[str, ArmPrompt],
    tenant: str | None = None,
    warmups: int = WARMUPS,
    repeats: int = REPEATS,
) -> dict[str, Timing]:
    """Time to the first token under every arm, and under ``prefix-hit``: all before the question is there.

    Their documents must have been compiled for each method.

    Args:
        prompts: by arm; ``full`` is the whole prompt, of which prefix-hit has the question left.

    Raises:
        InputError: an arm that compiled, or read from elsewhere than memory, in the last round; one that cannot run on
            its prompt; no ``full``.
    """
    if FULL not in prompts:
        raise InputError("prompts", "must have full, which the others are told in")
    read: dict[str, Ledger] = {}
    with ExitStack() as held:
        arms = {name: _reading(engine, prompt, tenant, name, read) for name, prompt in prompts.items()}
        arms[PREFIX_HIT] = _hitting(engine, place_runs(prompts[FULL].runs), tenant, held)
        taken = take_turns(arms, warmups, repeats)
    for name, ledger in read.items():
        elsewhere = set(ledger.bytes_read) - _IN_MEMORY
        if elsewhere:
            rule = f"{name} read from {', '.join(sorted(elsewhere))}; the memory tier must hold the documents"
            raise InputError("memory_bytes", rule, engine.settings.memory_bytes)
    return taken


def break_even(compile_seconds: float, full: float, arm: float) -> float | None:
    """Requests after which compiling has paid for itself; None where the arm is no faster than full prefill."""
    return compile_seconds / (full - arm) if arm < full else None


def _reading(
    engine: Engine, prompt: ArmPrompt, tenant: str | None, name: str, read: dict[str, Ledger]
) -> Callable[[], object]:
    method = prompt.method

    def once() -> None:
        placement = place_runs(prompt.runs, method.order, prompt.ranking, method.moved)
        with reading(engine, placement, method, tenant, 1, prompt.in_parts) as stands:
            read[name] = stands.ledger

    return once


def _hitting(engine: Engine, placement: Placement, tenant: str | None, held: ExitStack) -> Callable[[], object]:
    """What plain prefix caching gives when all but the last run is there."""
    _, ready = engine.reader.read(placement, METHODS["full"], tenant, Ledger(), 1)
    held.callback(engine.model.pool.release, ready)
    tail = placement.span(len(placement.runs) - 1)

    def once() -> None:
        int(repair(engine.model, ready, placement.ids, [tail])[-1].argmax())

    return once
