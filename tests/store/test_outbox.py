"""The outbox: order, bounds, and that nothing arrives after it was taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvquilt.identity import SegmentKey
from kvquilt.store.outbox import Outbox
from tests.store.segments import key_of, make
from tests.waiting import until

A, B, C = (key_of(make(number)) for number in (1, 2, 3))


def of(size: int) -> list[memoryview]:
    return [memoryview(bytes(size - 1)), memoryview(b"x")]


class Gate:
    """A `send` that notes what it gets and waits while it is shut."""

    def __init__(self) -> None:
        self.sent: list[tuple[SegmentKey, int | None]] = []
        self.begun = 0
        self.open = threading.Event()

    def __call__(self, key: SegmentKey, parts: Sequence[memoryview] | None) -> None:
        self.begun += 1
        assert self.open.wait(60)
        self.sent.append((key, None if parts is None else sum(part.nbytes for part in parts)))


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def busy(gate: Gate, limit: int = 100) -> Outbox:
    """An outbox whose thread stands in `send` with A."""
    made = Outbox(gate, limit)
    assert made.offer(A, of(10))
    until(lambda: gate.begun == 1)
    return made


def test_everything_is_sent_in_order_and_flush_waits_for_it(gate: Gate) -> None:
    box = busy(gate)
    assert box.offer(B, of(20))
    assert box.offer(C, None)
    assert not box.flush(0.01)
    assert len(box) == 3
    gate.open.set()
    assert box.flush(60)
    assert gate.sent == [(A, 10), (B, 20), (C, None)]
    assert box.close(60) == len(box) == 0


def test_of_two_for_one_key_that_wait_only_the_later_is_sent(gate: Gate) -> None:
    box = busy(gate)
    for parts in (of(90), None, of(30)):
        assert box.offer(B, parts)
        assert box.check() == ""
    assert box.offer(A, of(40)), "what is being sent is not what waits"
    gate.open.set()
    assert box.flush(60)
    assert gate.sent == [(A, 10), (B, 30), (A, 40)]


def test_what_does_not_fit_is_refused_and_what_is_sent_makes_room(gate: Gate) -> None:
    box = busy(gate)
    assert box.offer(B, of(60))
    assert not box.offer(C, of(41))
    assert not box.offer(B, of(101))
    assert box.offer(C, of(40))
    gate.open.set()
    assert box.flush(60)
    assert box.offer(C, of(100))
    assert box.flush(60)
    assert gate.sent == [(A, 10), (B, 60), (C, 40), (C, 100)]


def test_what_was_taken_back_does_not_arrive_later(gate: Gate) -> None:
    box = busy(gate)
    assert box.offer(B, of(60))
    box.discard(B, 0)
    assert box.offer(C, of(100)), "its room is free again"
    box.discard(A, 0.01)
    assert gate.sent == [], "it does not wait for ever"
    done = threading.Thread(target=box.discard, args=(A, 60))
    done.start()
    gate.open.set()
    done.join(60)
    assert gate.sent[0] == (A, 10), "what was being sent had arrived when it returned"
    assert box.flush(60)
    assert gate.sent == [(A, 10), (C, 100)]


def test_closing_gives_up_what_is_left_and_takes_nothing_more(gate: Gate) -> None:
    box = busy(gate)
    assert box.offer(B, of(20))
    assert box.offer(C, of(20))
    assert box.close(0.01) == 2
    assert not box.offer(B, of(1))
    gate.open.set()
    until(lambda: len(box) == 0)
    assert gate.sent == [(A, 10)]


def test_wrong_books_are_named(gate: Gate) -> None:
    box = busy(gate)
    assert box.offer(B, of(20))
    assert box.check() == ""
    box._bytes += 1
    assert "counts 21 waiting bytes, there are 20" in box.check()
    box._bytes -= 1


@pytest.mark.parametrize("act", [lambda box: box.flush(1), lambda box: box.discard(A, 1), lambda box: box.close(1)])
def test_an_outbox_that_nobody_used_has_no_thread(act: Callable[[Outbox], object]) -> None:
    box = Outbox(Gate(), 10)
    act(box)
    assert box._thread is None
