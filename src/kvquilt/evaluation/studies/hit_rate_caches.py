"""Two caches without their content: segments by key, and blocks of prefixes as serving engines keep them."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvquilt.errors import InputError, nearest


@dataclass(frozen=True, slots=True)
class Policy:
    """What is evicted first.

    Attributes:
        value: of uses, tokens, bytes and the work of computing them anew: what a segment is worth per byte. None: the
            one that was used last is worth most.
        ages: each value starts from a clock that rises to the value of the last victim, so that old fame fades.
        remembers: uses are counted on beyond eviction.
    """

    value: Callable[[int, int, int, float], float] | None
    ages: bool = False
    remembers: bool = False


POLICIES = {
    "lru": Policy(None),
    "lfu": Policy(lambda uses, tokens, size, work: uses, remembers=True),
    # what the store's tiers go by
    "store": Policy(lambda uses, tokens, size, work: tokens * uses / size, ages=True),
    # one hit is one hit, whatever its length: short segments stay
    "gdsf": Policy(lambda uses, tokens, size, work: uses / size, ages=True),
    "gdsf-work": Policy(lambda uses, tokens, size, work: uses * work / size, ages=True),
}


def find_policy(name: str) -> Policy:
    """Raises `InputError`: unknown; the message gives the nearest."""
    if name not in POLICIES:
        raise InputError("policies", f"unknown eviction policy{nearest(name, POLICIES)}", name)
    return POLICIES[name]


@dataclass(slots=True)
class _Entry:
    tokens: int
    work: float
    serial: int
    uses: int
    priority: tuple[float, int]


@dataclass(eq=False, slots=True)
class SegmentCache:
    """Whole segments up to `capacity` tokens, None for no bound; O(log n) a use.

    A request looks all its segments up and holds them; then what is missing arrives, shortest first as a compile batch
    delivers it, and evicts what nobody holds. What cannot be made room for is not kept, and evicts nothing.
    """

    policy: Policy
    capacity: int | None
    bytes_per_token: int = 1
    held: int = 0
    evictions: int = 0
    refused: int = 0
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _heap: list[tuple[tuple[float, int], int, int]] = field(default_factory=list)
    _seen: Counter[int] = field(default_factory=Counter)
    _clock: float = 0.0
    _tick: int = 0
    _serial: int = 0

    def request(self, wanted: Sequence[tuple[int, int, float]]) -> list[bool]:
        """Whether each of ``(key, tokens, work)``, different ones, was there."""
        hits = [key in self._entries for key, _, _ in wanted]
        for (key, _, _), hit in zip(wanted, hits, strict=True):
            if hit:
                entry = self._entries[key]
                entry.uses += 1
                self._seen[key] += 1
                entry.priority = self._priority(entry)
        missing = [each for each, hit in zip(wanted, hits, strict=True) if not hit]
        pinned = {key for key, _, _ in wanted}
        for key, tokens, work in sorted(missing, key=lambda each: each[1]):
            self._put(key, tokens, work, pinned)
        return hits

    def _put(self, key: int, tokens: int, work: float, pinned: set[int]) -> None:
        if not self._make_room(tokens, pinned):
            self.refused += 1
            return
        self._seen[key] += 1
        self._serial += 1
        uses = self._seen[key] if self.policy.remembers else 1
        entry = self._entries[key] = _Entry(tokens, work, self._serial, uses, (0.0, 0))
        entry.priority = self._priority(entry)
        self.held += tokens
        heapq.heappush(self._heap, (entry.priority, entry.serial, key))

    def _priority(self, entry: _Entry) -> tuple[float, int]:
        """Its value, then when it was last used where values do not tell."""
        self._tick += 1
        if self.policy.value is None:
            return self._tick, 0
        value = self.policy.value(entry.uses, entry.tokens, entry.tokens * self.bytes_per_token, entry.work)
        return (self._clock + value, 0) if self.policy.ages else (value, self._tick)

    def _make_room(self, tokens: int, pinned: set[int]) -> bool:
        if self.capacity is None or self.held + tokens <= self.capacity:
            return True
        kept = sum(self._entries[key].tokens for key in pinned if key in self._entries)
        if kept + tokens > self.capacity:
            return False
        spared = []
        while self.held + tokens > self.capacity:
            priority, serial, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.serial != serial:
                continue
            if entry.priority > priority:  # used since it was queued
                heapq.heappush(self._heap, (entry.priority, serial, key))
            elif key in pinned:
                spared.append((priority, serial, key))
            else:
                self._clock = max(self._clock, priority[0])
                self.held -= self._entries.pop(key).tokens
                self.evictions += 1
        for node in spared:
            heapq.heappush(self._heap, node)
        return True


@dataclass(slots=True)
class _Node:
    """A piece of text behind one certain prefix: `own` blocks end in it, the first `held` of which are there."""

    key: tuple[int, int]
    own: int
    held: int = 0


@dataclass(eq=False, slots=True)
class BlockCache:
    """Prefixes in blocks, each named by its own tokens and all before it, as vLLM keeps them.

    Only whole blocks count, a prompt's last token is always computed, and what was not used for longest goes first, of
    one prompt its last blocks. Pieces that differ share no token from their first on. `capacity` in tokens, None for
    no bound; O(pieces) a request.
    """

    capacity: int | None
    block: int = 16
    held: int = 0
    evictions: int = 0
    _ids: dict[tuple[int, int], int] = field(default_factory=dict)
    _nodes: OrderedDict[int, _Node] = field(default_factory=OrderedDict)
    _next: int = 1

    def request(self, pieces: Sequence[tuple[int, int]]) -> int:
        """Tokens at the beginning that were there, of a prompt of ``(piece, tokens)``; all of it is there afterwards,
        as far as there is room."""
        hit, whole, end, parent = 0, True, 0, 0
        chain = []
        for piece, tokens in pieces:
            first, end = end // self.block, end + tokens
            key = (parent, piece)
            name = self._ids.get(key)
            if name is None:
                name = self._ids[key] = self._next
                self._next += 1
                self._nodes[name] = _Node(key, end // self.block - first)
            node = self._nodes[name]
            if whole:
                hit += node.held
                whole = node.held == node.own
            self.held += (node.own - node.held) * self.block
            node.held = node.own
            chain.append(name)
            parent = name
        for name in reversed(chain):  # the deepest is the first to go
            self._nodes.move_to_end(name)
        self._shrink()
        return min(hit, (end - 1) // self.block) * self.block

    def _shrink(self) -> None:
        while self.capacity is not None and self.held > self.capacity:
            name, node = next(iter(self._nodes.items()))
            gone = min(node.held, -(-(self.held - self.capacity) // self.block))
            node.held -= gone
            self.held -= gone * self.block
            self.evictions += gone
            if not node.held:
                del self._nodes[name], self._ids[node.key]
