"""Threads and processes on one store: every read is verified by content, nothing is compiled twice, nobody hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from kvquilt.segment import CompiledSegment
from kvquilt.store import DiskTier, Store, Stored
from tests.store.segments import key_of, make, same, wanted

PATIENCE = 60.0


def together(*work: Callable[[], object]) -> list[object]:
    """Run all at once; a hang or an error in any of them fails the test."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(each) for each in work]
        return [future.result(timeout=PATIENCE) for future in futures]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", 1 << 20) as store:
        yield store
        store.check_integrity()


@pytest.mark.parametrize("memory_segments", [0, 5])
def test_eight_writers_and_eight_readers_never_see_wrong_content(tmp_path: Path, memory_segments: int) -> None:
    contents = {number: make(number) for number in range(1, 25)}
    nbytes = contents[1].nbytes
    with Store.open(tmp_path / "store", nbytes * memory_segments, 20_000) as store:
        until = time.monotonic() + 1.5
        wrong: list[int] = []
        reads: Counter[str] = Counter()

        def write(seed: int) -> None:
            random = Random(seed)
            while time.monotonic() < until:
                number = random.randint(1, 24)
                store.put(key_of(contents[number]), contents[number])
                if random.random() < 0.1:
                    store.rm(key=key_of(contents[random.randint(1, 24)]))

        def read(seed: int) -> None:
            random = Random(seed)
            while time.monotonic() < until:
                numbers = random.choices(range(1, 25), k=4)
                with store.fetch([wanted(contents[number]) for number in numbers]) as held:
                    for number, each in zip(numbers, held, strict=True):
                        reads[str(each.tier)] += 1
                        if each.segment is not None and not same(each.segment, contents[number]):
                            wrong.append(number)

        together(*[lambda s=seed: write(s) for seed in range(8)], *[lambda s=seed: read(s) for seed in range(8)])
        assert wrong == []
        assert reads["disk"] > 0
        assert set(store.stats()["disk"].misses) <= {"absent"}
        store.check_integrity()


_OTHER = """
import sys
from pathlib import Path
from kvquilt.store import Store
from tests.store.segments import key_of, make, same, wanted
with Store.open(sys.argv[1], 1 << 20, int(sys.argv[2])) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(100, 140):
        store.put(key_of(make(number)), make(number))
        store.clear_memory()
        with store.fetch([wanted(make(number - 60)), wanted(make(number))]) as held:
            assert held[0].segment is None or same(held[0].segment, make(number - 60))
            assert held[1].segment is None or same(held[1].segment, make(number))
            assert not {each.reason for each in held} - {"", "absent"}
    assert not store.stats()["disk"].failures, store.stats()
print("done", flush=True)
"""


@pytest.mark.parametrize("budget", [1 << 20, 30_000])
def test_two_processes_share_one_directory(tmp_path: Path, budget: int) -> None:
    root = Path(__file__).parents[2]
    place = tmp_path / "store"
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(place), str(budget)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with Store.open(place, 1 << 20, budget) as store:
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        for number in range(40, 80):
            assert isinstance(store.put(key_of(make(number)), make(number))["disk"], Stored)
            store.clear_memory()
            with store.fetch([wanted(make(number)), wanted(make(number + 60))]) as held:
                for each, expected in zip(held, (number, number + 60), strict=True):
                    assert each.segment is None or same(each.segment, make(expected))
                    assert each.reason in ("", "absent")
        remaining, _ = other.communicate(timeout=PATIENCE)
        assert remaining == "done\n"
        assert other.returncode == 0
        store.check_integrity()
        stats = store.stats()["disk"]
        assert stats.bytes <= budget
        if budget == 1 << 20:
            assert stats.segments == 80


def test_many_open_one_new_directory_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def open_and_put(number: int) -> None:
        barrier.wait()
        tier = DiskTier(tmp_path / "store")
        assert isinstance(tier.put(key_of(make(number)), make(number)), Stored)
        tier.close()

    together(*[lambda n=number: open_and_put(n) for number in range(8)])
    tier = DiskTier(tmp_path / "store")
    tier.check_integrity()
    assert tier.stats().segments == 8
    tier.close()


def test_one_missing_segment_is_compiled_once(store: Store) -> None:
    compiled: list[int] = []
    barrier = threading.Barrier(8)

    def compile(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        for at in missing:
            compiled.append(at)
            yield at, make(at + 1)

    def ask() -> None:
        barrier.wait()
        with store.fetch([wanted(make(1)), wanted(make(2))], compile) as held:
            assert all(same(each.segment, make(number)) for each, number in zip(held, (1, 2), strict=True))

    together(*[ask] * 8)
    assert sorted(compiled) == [0, 1]


def test_waiting_for_another_s_compile_needs_no_room_in_any_tier() -> None:
    compiled = threading.Semaphore(0)
    started, finish = threading.Event(), threading.Event()

    def slow(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        started.set()
        assert finish.wait(PATIENCE)
        compiled.release()
        yield 0, make(1)

    with Store.open(None, 0) as store:

        def ask() -> bool:
            with store.fetch([wanted(make(1))], slow) as held:
                return same(held[0].segment, make(1))

        def follow() -> bool:
            assert started.wait(PATIENCE)
            waiting.set()
            return ask()

        waiting = threading.Event()

        def let_go() -> bool:
            assert waiting.wait(PATIENCE)
            finish.set()
            return True

        assert together(ask, follow, let_go) == [True, True, True]
        store.check_integrity()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failed_compile_wakes_those_who_wait_and_they_compile(store: Store, error: type[BaseException]) -> None:
    started = threading.Event()
    attempts: list[str] = []

    def failing(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        started.set()
        attempts.append("failing")
        yield 0, make(1)
        raise error

    def working(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        attempts.append("working")
        for at in missing:
            yield at, make(at + 1)

    pairs = [wanted(make(1)), wanted(make(2))]

    def fail() -> None:
        with pytest.raises(error), store.fetch(pairs, failing):
            pass

    def succeed() -> None:
        assert started.wait(PATIENCE)
        with store.fetch(pairs, working) as held:
            assert all(same(each.segment, make(number)) for each, number in zip(held, (1, 2), strict=True))

    together(fail, *[succeed] * 4)
    assert sorted(attempts) == ["failing", "working"]


def test_overlapping_sets_in_other_orders_do_not_deadlock(store: Store) -> None:
    compiled: Counter[int] = Counter()

    def ask(seed: int) -> None:
        random = Random(seed)
        for round_ in range(8):
            numbers = random.sample(range(round_ * 8 + 1, round_ * 8 + 9), 6)

            def compile(missing: list[int], numbers: list[int] = numbers) -> Iterator[tuple[int, CompiledSegment]]:
                for at in missing:
                    compiled[numbers[at]] += 1
                    yield at, make(numbers[at])

            with store.fetch([wanted(make(number)) for number in numbers], compile) as held:
                assert all(same(each.segment, make(number)) for each, number in zip(held, numbers, strict=True))

    together(*[lambda s=seed: ask(s) for seed in range(6)])
    assert set(compiled.values()) == {1}


def test_after_two_hundred_requests_some_of_them_broken_nothing_is_held(tmp_path: Path) -> None:
    with Store.open(tmp_path, make(1).nbytes * 6, 30_000) as store:

        def request(number: int) -> None:
            random = Random(number)
            numbers = random.sample(range(1, 30), 3)

            def compile(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
                for at in missing:
                    if number % 3 == 1:
                        raise TimeoutError
                    yield at, make(numbers[at])

            try:
                with store.fetch([wanted(make(each)) for each in numbers], compile) as held:
                    assert all(same(each.segment, make(n)) for each, n in zip(held, numbers, strict=True))
                    if number % 3 == 0:
                        raise KeyboardInterrupt
            except (KeyboardInterrupt, TimeoutError):
                pass

        together(*[lambda w=worker: [request(n) for n in range(w, 200, 8)] for worker in range(8)])
        store.check_integrity()
        assert [stats.pinned for stats in store.stats().values()] == [0, 0]
        assert store.stats()["memory"].evictions > 0


def test_a_load_parked_in_the_middle_of_an_eviction_storm_stays_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvquilt.store.disk as disk

    parked, release = threading.Event(), threading.Event()
    decode = disk.decode

    def park(*arguments: object) -> CompiledSegment:
        if threading.current_thread() is loader:
            parked.set()
            assert release.wait(PATIENCE)
        return decode(*arguments)  # type: ignore[arg-type]

    results: list[bool] = []

    def load() -> None:
        with store.fetch([wanted(make(1))]) as held:
            results.append(same(held[0].segment, make(1)))

    with Store.open(tmp_path, make(1).nbytes * 2, 5_000) as store:
        store.put(key_of(make(1)), make(1))
        store.clear_memory()
        monkeypatch.setattr(disk, "decode", park)
        loader = threading.Thread(target=load)
        loader.start()
        assert parked.wait(PATIENCE)
        for number in range(2, 40):
            store.put(key_of(make(number)), make(number))
        store.rm(key=key_of(make(1)))
        release.set()
        loader.join(PATIENCE)
        assert results == [True]
        store.check_integrity()
