"""Streams that decode at the same time take their steps together, whoever's threads they are.

Of the threads that want a step, one leads: it waits, for a moment only, until all streams have asked for theirs, and
takes all of them in one forward. The others wait for what it finds. A stream alone takes its step as it always did.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kvquilt.errors import NumericsError
from kvquilt.model.batch import forward_together
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.slots import SlotCache

log = logging.getLogger(__name__)
PATIENCE = 0.003  # seconds for a stream that has not asked yet: longer than sampling takes, shorter than a step
AT_ONCE = 64  # streams in a forward


@dataclass(eq=False, slots=True)
class _Wish:
    """One stream's next step: `logits` ``[vocabulary]``, or the error that it ended in, once it is taken.

    `dropped`: nobody waits for it any more, and its cache may be another stream's.
    """

    cache: SlotCache
    token: int
    counter: RowCounter
    logits: torch.Tensor | None = None
    error: NumericsError | None = None
    dropped: bool = False

    def taken(self) -> bool:
        return self.logits is not None or self.error is not None


@dataclass(eq=False, slots=True)
class Steps:
    """Of one model. Thread-safe."""

    model: LanguageModel
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _wishes: list[_Wish] = field(default_factory=list, repr=False)
    _leader: _Wish | None = None

    @contextmanager
    def stream(self, cache: SlotCache) -> Iterator[None]:
        """One stream more inside the block, over `cache`: steps wait for it, for a moment."""
        try:
            with self.model.turns.streaming(id(cache)):
                yield
        finally:
            if not self.model.turns.streams:
                self.model.rides.ended(cache.parts)
            with self._changed:
                self._changed.notify_all()

    def step(self, cache: SlotCache, token: int, counter: RowCounter) -> torch.Tensor:
        """Write one token into the next slot of `cache` and return the logits behind it, ``[vocabulary]`` fp32.

        Raises:
            NumericsError: this stream's logits hold NaN; others' are not touched by it.
        """
        wish = _Wish(cache, token, counter)
        self.model.turns.asked(id(cache))
        try:
            with self._changed:
                self._wishes.append(wish)
                self._changed.notify_all()
            while not wish.taken():
                with self._changed:
                    while self._leader is not None and not wish.taken():
                        self._changed.wait()
                    if wish.taken():
                        break
                    self._leader = wish  # whatever ends this thread from here on, gives the lead back
                self._lead(wish)
        except BaseException:
            self._withdraw(wish)
            raise
        if wish.error is not None:
            raise wish.error
        assert wish.logits is not None
        return wish.logits

    def _withdraw(self, wish: _Wish) -> None:
        """Nobody writes into the cache of `wish` when this returns."""
        wish.dropped = True  # first: what interrupts this thread may do so twice
        with self._changed:
            if self._leader is wish:
                self._leader = None
                self._changed.notify_all()
            while wish not in self._wishes and self._leader is not None and not wish.taken():
                self._changed.wait()
            self._wishes = [each for each in self._wishes if each is not wish]

    def _lead(self, own: _Wish) -> None:
        chosen: list[_Wish] = []
        try:
            with self._changed:
                if own not in self._wishes:  # whoever took it along was stopped before giving it back
                    self._wishes.append(own)
                latest = time.monotonic() + PATIENCE
                while (
                    len(self._wishes) < min(self.model.turns.streams, AT_ONCE)
                    and (left := latest - time.monotonic()) > 0
                ):
                    self._changed.wait(left)
                self._wishes = [wish for wish in self._wishes if not wish.dropped]
                first = id(self._wishes[0].cache.parts)
                chosen = [wish for wish in self._wishes if id(wish.cache.parts) == first][:AT_ONCE]
                self._wishes = [wish for wish in self._wishes if wish not in chosen]
            self._take(chosen)
        finally:
            with self._changed:
                # what ended this thread, ended no other: their wishes stand, and one of them leads next
                left_over = [wish for wish in chosen if not wish.taken() and wish is not own]
                self._wishes = left_over + [wish for wish in self._wishes if wish not in left_over]
                self._leader = None
                self._changed.notify_all()

    def _take(self, chosen: Sequence[_Wish]) -> None:
        tokens, caches = [[wish.token] for wish in chosen], [wish.cache for wish in chosen]
        pace, beside = self.model.turns.pace, None
        try:
            riding = self.model.rides.boarding(chosen[0].cache.parts, pace.riding(len(chosen)))
            with self.model.turns.urgent(), riding as beside:
                found = forward_together(self.model, tokens, caches, [wish.counter for wish in chosen], beside)
        except NumericsError as error:
            if len(chosen) == 1:
                chosen[0].error = error
                return
            for wish in chosen:  # one of them is broken, and nobody knows which
                self._take([wish])
            return
        except Exception as error:
            if beside is None:
                raise
            log.warning("a prompt's rows do not go along with others' steps any more: %s", type(error).__name__)
            self._take(chosen)  # it may have failed by these rows
            return
        pace.step_took(len(chosen), 0 if beside is None else len(beside.ids), self.model.turns.held)
        for wish, logits in zip(chosen, found, strict=True):
            wish.logits = logits[-1]
