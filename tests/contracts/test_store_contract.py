"""What every tier of the store, and the tiers together, must do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from kvquilt.identity import SegmentKey, namespace
from kvquilt.remote import Limits, Remote
from kvquilt.segment import CompiledSegment
from kvquilt.store import (
    DiskTier,
    Failure,
    FailureReason,
    Hit,
    Layout,
    MemoryTier,
    Miss,
    MissReason,
    Quotas,
    RemoteTier,
    Row,
    Store,
    Stored,
    Tier,
    TierStats,
)
from kvquilt.store.s3 import S3Medium
from kvquilt.store.valkey import ValkeyMedium
from tests.store import s3_server, valkey_server
from tests.store.segments import bits, key_of, make, noted, same

LARGE = 1 << 24
LOCAL = ["memory", "disk", "store"]
REMOTE = [
    pytest.param("valkey", marks=pytest.mark.skipif(valkey_server.FOUND is None, reason=valkey_server.WHY_NOT)),
    pytest.param("s3", marks=pytest.mark.skipif(not s3_server.FOUND, reason=s3_server.WHY_NOT)),
]
# A server that others use has a budget of its own, evicts by itself and says nothing of either.
budgeted = pytest.mark.parametrize("open_tier", LOCAL, indirect=True)


class WrittenThrough(RemoteTier):
    """A remote tier whose writes are waited for, and which is as patient as these tests need on a busy machine."""

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        answer = super().put(key, segment)
        assert self.flush()
        assert self.stats().failures == {}
        return answer


class StoreAsTier(Tier):
    """A two-tier store behind the tier's verbs; its statistics and listing are the disk tier's."""

    name = "store"

    def __init__(self, root: Path, budget: int) -> None:
        self.store = Store.open(root, budget, budget)

    def get(self, key: SegmentKey, ids: tuple[int, ...], layout: Layout | None = None) -> Hit | Miss:
        with self.store.fetch([(key, ids)], layout=layout) as (held,):
            if held.segment is None:
                return Miss(MissReason(held.reason))
            return Hit(held.segment, held.bytes_read)

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        return self.store.put(key, segment)["disk"]

    def touch(self, key: SegmentKey) -> None:
        for tier in self.store.tiers:
            tier.touch(key)

    def remove(self, key: SegmentKey) -> bool:
        return self.store.rm(key=key) == 1

    def contains(self, key: SegmentKey) -> bool:
        return self.store.contains(key)

    def keys(self, namespace: str | None = None) -> Iterator[SegmentKey]:
        return (row.key for row in self.store.ls(namespace))

    def rows(self, namespace: str | None = None) -> Iterator[Row]:
        return iter(self.store.ls(namespace))

    def sizes(self) -> Mapping[str, int]:
        return self.store.tiers[1].sizes()

    def quote(self, quoting: Callable[[], Quotas]) -> None:
        self.store.quote(quoting)

    def pin(self, key: SegmentKey) -> AbstractContextManager[None]:
        return self.store.tiers[1].pin(key)

    def stats(self) -> TierStats:
        return self.store.stats()["disk"]

    def check_integrity(self) -> None:
        for tier in self.store.tiers:
            tier.check_integrity()

    def close(self) -> None:
        self.store.close()


Opener = Callable[[int], Tier]


@pytest.fixture(scope="module")
def valkey() -> Iterator[valkey_server.Server]:
    with valkey_server.running() as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.Server]:
    with s3_server.running() as server:
        yield server


@pytest.fixture(params=[*LOCAL, *REMOTE])
def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the tier with a budget in bytes, always in the same place; opening again is a restart."""
    opened: list[Tier] = []
    if request.param not in LOCAL:
        server = request.getfixturevalue(request.param)
        server.empty()
        place, limits = Remote.parse(server.url), Limits(deadline=10, write_deadline=10)

    def shut() -> None:
        while opened:
            tier = opened.pop()
            tier.check_integrity()
            assert tier.stats().pinned == 0
            tier.close()

    def open_it(budget: int) -> Tier:
        shut()
        kinds: dict[str, Callable[[], Tier]] = {
            "memory": lambda: MemoryTier(budget),
            "disk": lambda: DiskTier(tmp_path / "store", budget),
            "store": lambda: StoreAsTier(tmp_path / "store", budget),
            "valkey": lambda: WrittenThrough(ValkeyMedium(place), limits),
            "s3": lambda: WrittenThrough(S3Medium(place), limits),
        }
        opened.append(kinds[request.param]())
        return opened[-1]

    yield open_it
    shut()


@pytest.fixture
def size(open_tier: Opener) -> int:
    """What one segment of four tokens takes of the tier's budget; the tier is left empty."""
    tier = open_tier(LARGE)
    answer = tier.put(key_of(make(1)), make(1))
    assert isinstance(answer, Stored)
    assert tier.remove(key_of(make(1)))
    return answer.bytes


def put(tier: Tier, *segments: CompiledSegment) -> None:
    for segment in segments:
        assert isinstance(tier.put(key_of(segment), segment), Stored)


def has(tier: Tier, segment: CompiledSegment) -> bool:
    return key_of(segment) in set(tier.keys())


def test_what_was_put_comes_back_whole(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    put(tier, make(1), make(2, tokens=9))
    for segment in (make(1), make(2, tokens=9)):
        answer = tier.get(key_of(segment), segment.ids)
        assert isinstance(answer, Hit)
        assert same(answer.segment, segment)
        assert answer.bytes_read == segment.nbytes
    assert tier.get(key_of(make(3)), make(3).ids) == Miss(MissReason.ABSENT)
    stats = tier.stats()
    assert stats.misses["absent"] >= 1
    assert isinstance(tier, Tier)


def test_one_tenant_never_sees_another(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    segment = make(1)
    for tenant in ("a", None):
        tier.put(key_of(segment, tenant), segment)
    assert tier.get(key_of(segment, "b"), segment.ids) == Miss(MissReason.ABSENT)
    assert tier.get(key_of(segment, ""), segment.ids) == Miss(MissReason.ABSENT)
    assert isinstance(tier.get(key_of(segment, "a"), segment.ids), Hit)
    assert list(tier.keys(namespace("b"))) == []
    assert list(tier.rows(namespace("b"))) == []
    assert list(tier.keys(namespace("a"))) == [key_of(segment, "a")]
    assert [row.key for row in tier.rows(namespace(None))] == [key_of(segment, None)]
    assert len(list(tier.keys())) == 2
    assert not tier.remove(key_of(segment, "b"))
    assert len(list(tier.keys())) == 2


def test_a_restart_keeps_what_was_on_disk(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    tier.put(key_of(make(1), "a"), make(1))
    again = open_tier(LARGE)
    if again.name == "memory":
        assert again.stats().segments == 0
        return
    answer = again.get(key_of(make(1), "a"), make(1).ids)
    assert isinstance(answer, Hit)
    assert same(answer.segment, make(1))
    assert again.get(key_of(make(1), "b"), make(1).ids) == Miss(MissReason.ABSENT)


def test_other_ids_under_the_same_digest_are_a_collision_not_an_answer(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    put(tier, make(1))
    assert tier.get(key_of(make(1)), make(2).ids) == Miss(MissReason.COLLISION)
    assert tier.get(key_of(make(1)), make(1).ids[:-1]) == Miss(MissReason.COLLISION)
    assert tier.stats().integrity_failures >= 2
    assert isinstance(tier.get(key_of(make(1)), make(1).ids), Hit)


def test_putting_twice_stores_once_and_the_last_one_wins(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    put(tier, make(1))
    other = CompiledSegment(make(1).ids, make(5).keys, make(5).values, 3, "cd")
    put(tier, other)
    assert list(tier.keys()) == [key_of(make(1))]
    assert tier.stats().segments in (1, None)
    assert tier.stats().bytes in (sum(row.bytes for row in tier.rows()), None)
    answer = tier.get(key_of(make(1)), make(1).ids)
    assert isinstance(answer, Hit)
    assert same(answer.segment, other)


@budgeted
def test_bytes_are_the_sum_over_what_is_there(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    put(tier, *(make(number, tokens=number) for number in range(1, 8)))
    tier.remove(key_of(make(3, tokens=3)))
    rows = list(tier.rows())
    assert {row.tokens for row in rows} == {1, 2, 4, 5, 6, 7}
    assert tier.stats().bytes == sum(row.bytes for row in rows)
    assert tier.stats().segments == 6


@budgeted
def test_a_segment_larger_than_the_budget_is_refused_and_evicts_nothing(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 2)
    put(tier, make(1))
    large = make(2, tokens=64)
    assert tier.put(key_of(large), large) == Failure(FailureReason.OVER_BUDGET)
    assert has(tier, make(1))
    assert not has(tier, large)
    assert tier.stats().failures == {"over_budget": 1}


@budgeted
def test_the_budget_is_never_exceeded(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 3)
    for number in range(1, 30):
        put(tier, make(number))
        assert (tier.stats().bytes or 0) <= size * 3
    assert tier.stats().evictions == 26


@budgeted
def test_what_is_used_often_outlives_what_is_not(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 3)
    put(tier, make(1), make(2), make(3))
    for number in (1, 1, 1, 3, 3):
        tier.get(key_of(make(number)), make(number).ids)
    put(tier, make(4))
    assert [has(tier, make(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]


@budgeted
def test_old_fame_fades(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 2)
    put(tier, make(1))
    for _ in range(9):
        tier.touch(key_of(make(1)))
    put(tier, make(2), make(3), make(4))
    assert has(tier, make(1))
    put(tier, *(make(number) for number in range(5, 25)))
    assert not has(tier, make(1))


@budgeted
def test_pinned_segments_are_never_evicted(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 2)
    put(tier, make(1))
    with tier.pin(key_of(make(1))), tier.pin(key_of(make(1))):
        put(tier, *(make(number) for number in range(2, 20)))
        assert has(tier, make(1))
        assert tier.stats().pinned == 1
    assert tier.stats().pinned == 0
    put(tier, *(make(number) for number in range(20, 25)))
    assert not has(tier, make(1))


@budgeted
def test_when_everything_is_held_a_put_fails_and_loses_nothing(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 2)
    put(tier, make(1), make(2))
    with tier.pin(key_of(make(1))), tier.pin(key_of(make(2))):
        assert tier.put(key_of(make(3)), make(3)) == Failure(FailureReason.HELD)
        assert isinstance(tier.put(key_of(make(2)), make(2)), Stored)
    assert has(tier, make(1))
    assert has(tier, make(2))


def test_a_pin_is_released_when_the_body_fails(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    with pytest.raises(KeyboardInterrupt), tier.pin(key_of(make(1))):
        raise KeyboardInterrupt
    assert tier.stats().pinned == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bit_patterns_survive(open_tier: Opener, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.max, info.min, info.tiny, info.smallest_normal / 4, -info.smallest_normal / 4, 1.0]
    special += [float("inf"), float("-inf"), float("nan"), info.eps]
    content = torch.tensor(special, dtype=dtype).view(1, 1, 3, 4)
    assert (content == 0).sum() == 2, "the subnormals must not have been flushed"
    segment = CompiledSegment((7, 8, 9), content, content.flip(2))
    tier = open_tier(LARGE)
    put(tier, segment)
    if tier.name != "memory":
        tier = open_tier(LARGE)
    answer = tier.get(key_of(segment), segment.ids)
    assert isinstance(answer, Hit)
    assert bits(answer.segment.keys) == bits(content)
    assert bits(answer.segment.values) == bits(content.flip(2))


def test_an_empty_segment_is_a_segment(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    empty = make(1, tokens=0)
    put(tier, empty)
    answer = tier.get(key_of(empty), ())
    assert isinstance(answer, Hit)
    assert same(answer.segment, empty)
    assert answer.bytes_read == 0


def test_another_dtype_or_shape_than_the_model_s_is_a_miss(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    segment = make(1, dtype=torch.float16)
    put(tier, segment)
    fits = Layout.of(segment)
    assert isinstance(tier.get(key_of(segment), segment.ids, fits), Hit)
    wrong = Layout(torch.bfloat16, fits.layers, fits.kv_heads, fits.key_dim, fits.value_dim)
    assert tier.get(key_of(segment), segment.ids, wrong) == Miss(MissReason.WRONG_DTYPE)
    wrong = Layout(torch.float16, fits.layers + 1, fits.kv_heads, fits.key_dim, fits.value_dim)
    assert tier.get(key_of(segment), segment.ids, wrong) == Miss(MissReason.WRONG_SHAPE)
    assert tier.stats().misses["wrong_dtype"] == 1


def test_slices_of_a_larger_batch_are_stored_alone(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    batch_keys, batch_values = torch.randn(2, 2, 2, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()
    segment = CompiledSegment((4, 5, 6), batch_keys[:, :, 3:6], batch_values[:, :, 3:6])
    put(tier, segment)
    answer = tier.get(key_of(segment), segment.ids)
    assert isinstance(answer, Hit)
    assert same(answer.segment, segment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4])
def test_side_data_comes_back_whole_and_counts(open_tier: Opener, dtype: torch.dtype, tokens: int) -> None:
    tier = open_tier(LARGE)
    segment, plain = noted(1, tokens, dtype), make(1, tokens, dtype)
    put(tier, plain)
    (alone,) = (row.bytes for row in tier.rows())
    put(tier, segment)
    extra = sum(tensor.nbytes for tensor in segment.side.values())
    assert segment.nbytes == plain.nbytes + extra
    (both,) = (row.bytes for row in tier.rows())
    assert both >= alone + extra
    if tier.name != "memory":
        tier = open_tier(LARGE)
    answer = tier.get(key_of(segment), segment.ids, Layout.of(segment))
    assert isinstance(answer, Hit)
    assert same(answer.segment, segment)
    assert answer.bytes_read == segment.nbytes
    assert all(not tensor.is_cuda for tensor in answer.segment.side.values())


def test_a_segment_without_the_side_data_it_needs_is_a_counted_miss_until_it_is_replaced(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    plain, segment = make(1), noted(1)
    needs = dataclasses.replace(Layout.of(plain), side=frozenset({"outside", "digest"}))
    put(tier, plain)
    assert tier.get(key_of(plain), plain.ids, needs) == Miss(MissReason.SIDE_DATA_MISSING)
    assert tier.stats().misses["side_data_missing"] == 1
    assert isinstance(tier.get(key_of(plain), plain.ids, Layout.of(plain)), Hit), "it is sound for everybody else"
    put(tier, segment)
    answer = tier.get(key_of(plain), plain.ids, needs)
    assert isinstance(answer, Hit)
    assert same(answer.segment, segment), "more side data than is needed does no harm"
    assert isinstance(tier.get(key_of(plain), plain.ids, Layout.of(plain)), Hit)
    wrong = dataclasses.replace(needs, layers=needs.layers + 1)
    assert tier.get(key_of(plain), plain.ids, wrong) == Miss(MissReason.WRONG_SHAPE)


def test_side_data_that_are_slices_are_stored_alone(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    large = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    segment = dataclasses.replace(make(1), side={"residual-2": large[5:9]})
    put(tier, segment)
    answer = tier.get(key_of(segment), segment.ids)
    assert isinstance(answer, Hit)
    assert same(answer.segment, segment)
    if tier.name == "memory":
        assert answer.segment.side["residual-2"].untyped_storage().nbytes() == 4 * 8 * 4


def test_several_at_once_are_answered_each_for_itself_and_in_order(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    segments = [make(number, tokens=number) for number in range(1, 12)]
    put(tier, *segments[::2])
    asked = [(key_of(segment), segment.ids, Layout.of(segment)) for segment in segments]
    asked[2] = (asked[2][0], (1, 2), None)
    answers = tier.get_many([*asked, asked[0]])
    hits = [answer.segment if isinstance(answer, Hit) else answer for answer in answers]
    assert hits[2] == Miss(MissReason.COLLISION)
    assert {hits[i] for i in range(1, 11, 2)} == {Miss(MissReason.ABSENT)}
    for i, segment in [(0, segments[0]), (4, segments[4]), (10, segments[10]), (11, segments[0])]:
        assert same(hits[i], segment), i
    assert tier.get_many([]) == []


def test_what_was_removed_is_gone(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    put(tier, make(1), make(2))
    held = tier.get(key_of(make(1)), make(1).ids)
    assert tier.remove(key_of(make(1)))
    assert not tier.remove(key_of(make(1)))
    assert tier.get(key_of(make(1)), make(1).ids) == Miss(MissReason.ABSENT)
    assert list(tier.keys()) == [key_of(make(2))]
    assert isinstance(held, Hit)
    assert same(held.segment, make(1)), "what was handed out stays valid"


def quote(tier: Tier, **bytes: int) -> None:
    """Hold tenants to these."""
    assert isinstance(tier, MemoryTier | DiskTier | StoreAsTier)
    quotas = Quotas({namespace(tenant): size for tenant, size in bytes.items()})
    tier.quote(lambda: quotas)


def fill(tier: Tier, tenant: str, *numbers: int) -> list[Stored | Failure]:
    return [tier.put(key_of(make(number), tenant), make(number)) for number in numbers]


def numbers_of(tier: Tier, tenant: str, numbers: range) -> list[int]:
    kept = set(tier.keys(namespace(tenant)))
    return [number for number in numbers if key_of(make(number), tenant) in kept]


def test_bytes_are_told_by_namespace(open_tier: Opener) -> None:
    tier = open_tier(LARGE)
    fill(tier, "a", 1, 2)
    fill(tier, "b", 1)
    if isinstance(tier, RemoteTier):
        assert tier.sizes() == {}
        return
    sizes = tier.sizes()
    assert sizes[namespace("a")] == 2 * sizes[namespace("b")] > 0
    assert sum(sizes.values()) == tier.stats().bytes
    tier.remove(key_of(make(1), "b"))
    assert {space for space, size in tier.sizes().items() if size} == {namespace("a")}


@budgeted
def test_a_flood_evicts_its_own_tenant_s_segments_and_nobody_else_s(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 6)
    quote(tier, a=size * 3, b=size * 3)
    fill(tier, "a", 1, 2, 3)
    assert all(isinstance(each, Stored) for each in fill(tier, "b", *range(1, 40)))
    assert numbers_of(tier, "a", range(50)) == [1, 2, 3]
    assert numbers_of(tier, "b", range(50)) == [37, 38, 39]
    assert tier.stats().evictions == 36


@budgeted
def test_the_least_useful_of_the_tenant_goes_first_whatever_others_do(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 6)
    quote(tier, a=size * 3, b=size * 3)
    fill(tier, "a", 1, 2, 3)
    for number in (1, 1, 1, 3, 3):
        tier.get(key_of(make(number), "a"), make(number).ids)
    fill(tier, "b", *range(1, 100))  # another's evictions do not age them
    fill(tier, "a", 4)
    assert numbers_of(tier, "a", range(50)) == [1, 3, 4]


@budgeted
def test_room_below_the_quota_is_nobody_else_s(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 6)
    quote(tier, a=size * 2, b=size * 4)
    fill(tier, "a", *range(1, 20))
    assert len(numbers_of(tier, "a", range(50))) == 2
    assert tier.stats().bytes == size * 2


@budgeted
def test_more_than_a_quota_at_once_and_without_one_is_refused_and_evicts_nothing(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 6)
    quote(tier, a=size)
    fill(tier, "a", 1)
    large = make(2, tokens=12)
    assert tier.put(key_of(large, "a"), large) == Failure(FailureReason.OVER_QUOTA)
    assert fill(tier, "b", 1) == [Failure(FailureReason.OVER_QUOTA)]
    assert numbers_of(tier, "a", range(3)) == [1]
    assert tier.stats().failures == {"over_quota": 2}


@budgeted
def test_who_is_over_a_quota_that_shrank_gives_way_first_and_only_down_to_it(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 6)
    quote(tier, a=size * 4, b=size, c=size)
    fill(tier, "a", 1, 2, 3, 4)
    fill(tier, "b", 1)
    fill(tier, "c", 1)
    quote(tier, a=size * 2, b=size, c=size * 3)
    fill(tier, "c", *range(2, 30))
    assert [len(numbers_of(tier, tenant, range(50))) for tenant in "abc"] == [2, 1, 3]


@budgeted
def test_what_was_there_before_quotas_or_belongs_to_nobody_any_more_goes_first(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 4)
    fill(tier, "gone", 1, 2)
    fill(tier, "a", 1, 2)
    quote(tier, a=size * 2, b=size * 2)
    fill(tier, "b", 1, 2, 3)
    assert [len(numbers_of(tier, tenant, range(50))) for tenant in ("gone", "a", "b")] == [0, 2, 2]


@budgeted
def test_quotas_beyond_the_budget_are_less_in_proportion(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 6)
    quote(tier, a=size * 8, b=size * 4)
    fill(tier, "a", *range(1, 20))
    fill(tier, "b", *range(1, 20))
    assert [len(numbers_of(tier, tenant, range(50))) for tenant in "ab"] == [4, 2]


@budgeted
def test_what_is_held_stays_within_a_quota_too(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 6)
    quote(tier, a=size * 2, b=size * 4)
    fill(tier, "a", 1, 2)
    with tier.pin(key_of(make(1), "a")):
        fill(tier, "a", *range(3, 20))
        assert numbers_of(tier, "a", range(50)) == [1, 19]
        with tier.pin(key_of(make(19), "a")):
            assert fill(tier, "a", 30) == [Failure(FailureReason.HELD)]
            assert isinstance(fill(tier, "a", 19)[0], Stored)
            assert isinstance(fill(tier, "b", 30)[0], Stored), "others' holds hinder nobody"


@budgeted
def test_quotas_survive_a_restart_as_far_as_what_is_stored_does(open_tier: Opener, size: int) -> None:
    tier = open_tier(size * 4)
    quote(tier, a=size * 2, b=size * 2)
    fill(tier, "a", 1, 2)
    fill(tier, "b", *range(1, 9))
    again = open_tier(size * 4)
    if again.name == "memory":
        return
    quote(again, a=size * 2, b=size * 2)
    fill(again, "b", *range(9, 20))
    assert numbers_of(again, "a", range(9)) == [1, 2]
