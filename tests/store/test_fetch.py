"""`Store.fetch` in one thread: what is held, in which order, from where, and what an interruption keeps."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvquilt.errors import InputError, IntegrityError, StoreError
from kvquilt.identity import SegmentKey, namespace
from kvquilt.segment import CompiledSegment
from kvquilt.store import Failure, Layout, MemoryTier, Miss, MissReason, Store
from tests.store.segments import key_of, make, noted, same, wanted


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", 1 << 20) as store:
        yield store
        store.check_integrity()


class Compiler:
    """Compiles numbered segments and remembers what it was asked for."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.calls: list[list[int]] = []

    def __call__(self, missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        self.calls.append(list(missing))
        for at in reversed(missing):
            yield at, make(self.numbers[at])

    @property
    def wanted(self) -> list[tuple[SegmentKey, tuple[int, ...]]]:
        return [wanted(make(number)) for number in self.numbers]


def test_everything_is_held_in_the_order_it_was_wanted(store: Store) -> None:
    store.put(key_of(make(2)), make(2))
    compiler = Compiler([3, 2, 1, 3])
    with store.fetch(compiler.wanted, compiler) as held:
        assert all(same(each.segment, make(number)) for each, number in zip(held, compiler.numbers, strict=True))
        assert [each.tier for each in held] == ["compiled", "memory", "compiled", "compiled"]
        assert [each.reason for each in held] == ["absent", "", "absent", "absent"]
        assert held[1].bytes_read == make(2).nbytes
        assert held[0].bytes_read == 0
    assert compiler.calls == [[0, 2]], "once, and a duplicate is compiled once"


@pytest.mark.parametrize("stored", [(1, 3), (2,), (3, 4), ()])
def test_after_a_partial_hit_everything_is_stored_once(store: Store, stored: tuple[int, ...]) -> None:
    for number in stored:
        store.put(key_of(make(number)), make(number))
    compiler = Compiler([1, 2, 3, 4])
    with store.fetch(compiler.wanted, compiler):
        pass
    assert {row.key for row in store.ls()} == {key_of(make(number)) for number in (1, 2, 3, 4)}
    assert [stats.segments for stats in store.stats().values()] == [4, 4]
    before = list(compiler.calls)
    with store.fetch(compiler.wanted, compiler) as held:
        assert {each.tier for each in held} == {"memory"}
    assert compiler.calls == before


def test_a_disk_hit_moves_into_memory(store: Store, tmp_path: Path) -> None:
    store.put(key_of(make(1)), make(1))
    store.clear_memory()
    for tier in ("disk", "memory"):
        with store.fetch([wanted(make(1))]) as held:
            assert held[0].tier == tier
            assert held[0].bytes_read == make(1).nbytes
            assert same(held[0].segment, make(1))
    assert store.ls()[0].frequency == 3, "a hit in memory counts on disk, or the hottest would be evicted there"


def test_looking_up_compiles_nothing_and_says_why(store: Store) -> None:
    store.put(key_of(make(1)), make(1))
    with store.fetch([wanted(make(1)), wanted(make(2)), (key_of(make(1)), make(2).ids)]) as held:
        assert [each.tier for each in held] == ["memory", None, None]
        assert [each.reason for each in held] == ["", "absent", "collision"]
        assert held[1].segment is None


def test_the_reason_of_a_miss_is_the_damage_not_the_empty_memory(store: Store) -> None:
    store.put(key_of(make(1)), make(1))
    store.clear_memory()
    assert store.disk is not None
    store.disk.files.path(key_of(make(1))).write_bytes(b"damaged!")
    compiler = Compiler([1])
    with store.fetch(compiler.wanted, compiler) as held:
        assert (held[0].tier, held[0].reason) == ("compiled", "corrupt")
    store.clear_memory()
    with store.fetch(compiler.wanted) as held:
        assert same(held[0].segment, make(1)), "the put replaced the damaged file"


def test_a_segment_of_another_layout_is_compiled_anew(store: Store) -> None:
    store.put(key_of(make(1)), CompiledSegment(make(1).ids, make(1).keys.half(), make(1).values.half()))
    compiler = Compiler([1])
    with store.fetch(compiler.wanted, compiler, Layout.of(make(1))) as held:
        assert (held[0].tier, held[0].reason) == ("compiled", "wrong_dtype")
        assert same(held[0].segment, make(1))


def test_two_contents_under_one_digest_are_both_right(store: Store) -> None:
    key = SegmentKey(namespace(None), "0" * 64)
    contents = [make(1), make(2)]
    pairs = [(key, segment.ids) for segment in contents]
    for _ in range(2):
        with store.fetch(pairs, lambda missing: [(at, contents[at]) for at in missing]) as held:
            assert all(same(each.segment, segment) for each, segment in zip(held, contents, strict=True))
    assert store.stats()["memory"].integrity_failures > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_compile_keeps_what_is_finished(store: Store, error: type[BaseException]) -> None:
    def interrupted(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        yield 0, make(1)
        raise error

    numbers = [1, 2]
    with pytest.raises(error), store.fetch([wanted(make(number)) for number in numbers], interrupted):
        pytest.fail("there is nothing to hold")
    store.check_integrity()
    compiler = Compiler(numbers)
    with store.fetch(compiler.wanted, compiler) as held:
        assert [each.tier for each in held] == ["memory", "compiled"]


def test_an_error_while_holding_releases_everything(store: Store) -> None:
    compiler = Compiler([1, 2])
    with pytest.raises(ZeroDivisionError), store.fetch(compiler.wanted, compiler) as held:
        held[0].bytes_read // 0
    with store.fetch(compiler.wanted):
        assert store.stats()["memory"].pinned == 2
    assert store.stats()["memory"].pinned == store.stats()["disk"].pinned == 0


def test_a_compile_that_breaks_its_promise_is_an_error(store: Store) -> None:
    pairs = [wanted(make(1)), wanted(make(2))]
    with pytest.raises(StoreError, match=r"nothing for indices \[1\]"), store.fetch(pairs, lambda _: [(0, make(1))]):
        pass
    with pytest.raises(StoreError, match="index 0"), store.fetch(pairs, lambda _: [(0, make(1))]):
        pass
    with pytest.raises(StoreError, match="index 1"), store.fetch(pairs, lambda _: [(1, make(3))]):
        pass
    assert not store.contains(key_of(make(2)))


def test_a_nested_fetch_of_the_same_segment_does_not_wait_for_itself(store: Store) -> None:
    def nested(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        with store.fetch([wanted(make(1))], lambda _: [(0, make(1))]) as held:
            assert held[0].segment is not None
            yield 0, held[0].segment

    with store.fetch([wanted(make(1))], nested) as held:
        assert same(held[0].segment, make(1))


def test_held_segments_survive_an_eviction_storm(tmp_path: Path) -> None:
    budget = make(1).nbytes * 3
    with Store.open(tmp_path, budget, 10_000) as store:
        compiler = Compiler([1, 2])
        with store.fetch(compiler.wanted, compiler) as held:
            for number in range(3, 60):
                store.put(key_of(make(number)), make(number))
            assert store.memory is not None
            assert store.memory.contains(key_of(make(1)))
            assert all(same(each.segment, make(number)) for each, number in zip(held, (1, 2), strict=True))
        store.check_integrity()


def test_without_room_for_anything_answers_are_still_right() -> None:
    with Store.open(None, 0) as store:
        compiler = Compiler([1, 2, 1])
        with store.fetch(compiler.wanted, compiler) as held:
            assert all(same(each.segment, make(number)) for each, number in zip(held, compiler.numbers, strict=True))
        assert store.stats()["memory"].failures == {"over_budget": 2}
        assert store.stats()["memory"].segments == 0


class BrokenTier(MemoryTier):
    """A tier whose medium went away."""

    name = "broken"

    def get(self, key: SegmentKey, ids: tuple[int, ...], layout: Layout | None = None) -> Miss:
        raise OSError(errno.EIO, "gone")

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Failure:
        raise OSError(errno.EIO, "gone")


def test_a_tier_that_raises_is_a_counted_miss_not_an_error() -> None:
    with Store(MemoryTier(1 << 20), BrokenTier(1 << 20)) as store:
        compiler = Compiler([1])
        with store.fetch(compiler.wanted, compiler) as held:
            assert (held[0].tier, held[0].reason) == ("compiled", MissReason.UNREADABLE)
        stats = store.stats()["broken"]
        assert (stats.misses["unreadable"], stats.failures["io_error"]) == (1, 1)


def test_integrity_names_pins_that_nobody_holds(store: Store) -> None:
    assert store.memory is not None
    pin = store.memory.pin(key_of(make(1)))
    with pin, pytest.raises(IntegrityError, match="memory tier: 1 segments are pinned"):
        store.check_integrity()


def test_integrity_names_bytes_that_do_not_add_up(store: Store) -> None:
    store.put(key_of(make(1)), make(1))
    assert store.memory is not None
    (pool,) = store.memory._pools.values()
    pool.bytes += 1
    with pytest.raises(IntegrityError, match="memory tier: counts"):
        store.check_integrity()
    pool.bytes -= 1


def test_integrity_names_files_and_rows_that_disagree(store: Store) -> None:
    store.put(key_of(make(1)), make(1))
    assert store.disk is not None
    path = store.disk.files.path(key_of(make(1)))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(IntegrityError, match="the index says"):
        store.check_integrity()
    path.unlink()
    with pytest.raises(IntegrityError, match="no file"):
        store.check_integrity()
    store.gc()
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="no index row"):
        store.check_integrity()
    store.gc()


def test_rm_takes_one_a_namespace_or_all(store: Store) -> None:
    for tenant in ("a", "b"):
        for number in (1, 2):
            store.put(key_of(make(number), tenant), make(number))
        store.write_note(namespace(tenant), "verdict", {"passes": True})
    assert store.rm(key=key_of(make(1), "a")) == 1
    assert store.rm(namespace=namespace("b")) == 2
    assert store.read_note(namespace("b"), "verdict") is None
    assert store.read_note(namespace("a"), "verdict") == {"passes": True}
    assert [row.key for row in store.ls()] == [key_of(make(2), "a")]
    assert store.rm(everything=True) == 1
    assert store.ls() == []
    for bad in ({}, {"namespace": namespace("a"), "everything": True}):
        with pytest.raises(InputError, match="exactly one"):
            store.rm(**bad)


@pytest.mark.parametrize("field", ["memory_bytes", "disk_bytes"])
def test_a_negative_budget_is_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(InputError, match=field):
        Store.open(tmp_path, **{"memory_bytes": 0} | {field: -1})


def test_a_segment_without_needed_side_data_is_compiled_anew_and_replaced_in_every_tier(store: Store) -> None:
    for number in (1, 2):
        store.put(key_of(make(number)), make(number))
    plain = Layout.of(make(1))
    needs = Layout.of(noted(1))
    calls: list[list[int]] = []

    def compile(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        calls.append(missing)
        for at in missing:
            yield at, noted(at + 1)

    both = [wanted(make(1)), wanted(make(2))]
    with store.fetch(both, compile, layout=[needs, plain]) as held:
        assert [each.reason for each in held] == ["side_data_missing", ""]
        assert same(held[0].segment, noted(1))
        assert same(held[1].segment, make(2)), "what needs none is left alone"
    assert calls == [[0]]
    assert all(stats.misses["side_data_missing"] == 1 for stats in store.stats().values())
    store.clear_memory()
    with store.fetch(both, compile, layout=[needs, plain]) as held:
        assert [each.tier for each in held] == ["disk", "disk"]
        assert same(held[0].segment, noted(1))
    assert calls == [[0]]


def test_memory_without_side_data_is_filled_from_a_disk_that_has_them(store: Store) -> None:
    assert store.disk is not None
    store.disk.put(key_of(noted(1)), noted(1))
    assert store.memory is not None
    store.memory.put(key_of(make(1)), make(1))
    for tier in ("disk", "memory"):
        with store.fetch([wanted(make(1))], layout=Layout.of(noted(1))) as held:
            assert held[0].tier == tier


def test_a_segment_wanted_twice_has_the_side_data_of_both(store: Store) -> None:
    plain = Layout.of(make(1))
    needs = Layout.of(noted(1))
    store.put(key_of(make(1)), make(1))

    def compile(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        yield from ((at, noted(1)) for at in missing)

    with store.fetch([wanted(make(1))] * 2, compile, layout=[plain, needs]) as held:
        assert [same(each.segment, noted(1)) for each in held] == [True, True]


def test_a_compiler_that_leaves_needed_side_data_out_is_an_error(store: Store) -> None:
    with (
        pytest.raises(StoreError, match="does not have"),
        store.fetch([wanted(make(1))], Compiler([1]), layout=Layout.of(noted(1))),
    ):
        pytest.fail("nothing was to be had")
    assert not store.contains(key_of(make(1)))
