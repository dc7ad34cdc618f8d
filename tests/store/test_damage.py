"""Whatever happens to a file of the store, reading it is a clean miss with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.identity import SegmentKey
from kvquilt.segment import CompiledSegment
from kvquilt.store import DiskTier, Hit, Miss, MissReason, Store, Stored
from kvquilt.store.format import encode, parse
from tests.store.segments import key_of, make, noted, same, wanted


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "store")
    for number in (1, 2, 3):
        assert isinstance(tier.put(key_of(make(number)), make(number)), Stored)
    yield tier
    tier.close()


def path_of(tier: DiskTier, number: int) -> Path:
    return tier.files.path(key_of(make(number)))


def get(tier: DiskTier, number: int) -> Hit | Miss:
    return tier.get(*wanted(make(number)))


def others_are_intact(tier: DiskTier) -> bool:
    answers = [get(tier, number) for number in (2, 3)]
    return all(
        isinstance(answer, Hit) and same(answer.segment, make(number))
        for answer, number in zip(answers, (2, 3), strict=True)
    )


def reseal(content: bytes, changes: dict[str, str], tensors: dict[str, dict[str, object]] | None = None) -> bytes:
    """The file with other metadata, or other things said of its tensors, and a checksum that is right for them."""
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])
    header["__metadata__"] |= changes | {"checksum": "0" * 64}
    for name, change in (tensors or {}).items():
        header[name] |= change
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    head = len(text).to_bytes(8, "little") + text
    digest = blake3(head + content[length:]).hexdigest()
    return head.replace(b"0" * 64, digest.encode(), 1) + content[length:]


def test_a_file_cut_anywhere_is_never_a_segment(tier: DiskTier) -> None:
    path = path_of(tier, 1)
    content = path.read_bytes()
    header = parse(content, len(content))
    edges = {0, 1, 7, 8, 9, header.keys_at, header.values_at, header.ids_at, len(content) - 1}
    for length in sorted(edges | {edge - 1 for edge in edges if edge} | set(range(0, len(content), 97))):
        path.write_bytes(content[:length])
        answer = get(tier, 1)
        assert isinstance(answer, Miss), f"cut at {length}"
        assert answer.reason in (MissReason.TRUNCATED, MissReason.CORRUPT)
    assert tier.stats().misses["truncated"] > 10
    path.write_bytes(content + b"\x00")
    assert get(tier, 1) == Miss(MissReason.CORRUPT)
    path.write_bytes(content)
    assert isinstance(get(tier, 1), Hit)
    assert others_are_intact(tier)


def test_one_flipped_bit_anywhere_is_never_a_segment(tier: DiskTier) -> None:
    path = path_of(tier, 1)
    content = path.read_bytes()
    header = parse(content, len(content))
    body = [*range(header.keys_at, header.values_at, 101), *range(header.values_at, header.ids_at, 101)]
    for at in [*range(header.keys_at), *body, *range(header.ids_at, len(content))]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        assert isinstance(get(tier, 1), Miss), f"bit flipped in byte {at}"
    assert set(tier.stats().misses) <= {"corrupt", "truncated", "wrong_version", "swapped", "wrong_dtype"}
    assert others_are_intact(tier)


def test_damage_after_a_verified_read_is_seen(tier: DiskTier) -> None:
    assert isinstance(get(tier, 1), Hit)
    path = path_of(tier, 1)
    content = bytearray(path.read_bytes())
    modified = path.stat().st_mtime_ns
    content[-30] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(modified + 1, modified + 1))
    assert get(tier, 1) == Miss(MissReason.CORRUPT)


def test_two_swapped_files_answer_for_nobody(tier: DiskTier, tmp_path: Path) -> None:
    one, two = path_of(tier, 1), path_of(tier, 2)
    os.rename(one, tmp_path / "aside")
    os.rename(two, one)
    os.rename(tmp_path / "aside", two)
    assert get(tier, 1) == get(tier, 2) == Miss(MissReason.SWAPPED)
    assert isinstance(get(tier, 3), Hit)


def test_another_tenant_s_file_copied_over_is_not_served(tier: DiskTier) -> None:
    segment = make(1)
    theirs = key_of(segment, "theirs")
    tier.put(theirs, segment)
    tier.files.path(theirs).write_bytes(path_of(tier, 1).read_bytes())
    assert tier.get(theirs, segment.ids) == Miss(MissReason.SWAPPED)


def test_a_deleted_file_is_absent_and_leaves_the_index(tier: DiskTier) -> None:
    path_of(tier, 1).unlink()
    assert get(tier, 1) == Miss(MissReason.ABSENT)
    assert tier.stats().segments == 2
    tier.check_integrity()


def test_a_file_of_another_version_is_a_miss(tier: DiskTier) -> None:
    path = path_of(tier, 1)
    path.write_bytes(reseal(path.read_bytes(), {"version": "2"}))
    assert get(tier, 1) == Miss(MissReason.WRONG_VERSION)


def test_header_and_payload_that_disagree_about_the_dtype_are_corrupt(tier: DiskTier) -> None:
    path = path_of(tier, 1)
    sealed = reseal(path.read_bytes(), {})
    path.write_bytes(sealed)
    assert isinstance(get(tier, 1), Hit), "resealing alone does no damage"
    path.write_bytes(reseal(sealed, {"dtype": "BF16"}))
    assert get(tier, 1) == Miss(MissReason.CORRUPT)


def test_a_forged_file_with_other_ids_is_a_collision(tier: DiskTier) -> None:
    other = CompiledSegment((9, 9, 9, 9), make(1).keys, make(1).values)
    tier.put(key_of(make(1)), other)
    assert get(tier, 1) == Miss(MissReason.COLLISION)
    assert tier.stats().integrity_failures == 1


def test_damage_of_every_kind_is_counted_and_absence_is_not(tier: DiskTier) -> None:
    for n, damage in enumerate((lambda raw: raw[:100], lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])), start=1):
        path_of(tier, n).write_bytes(damage(path_of(tier, n).read_bytes()))
        assert isinstance(get(tier, n), Miss)
        assert tier.stats().integrity_failures == n
    path_of(tier, 3).write_bytes(path_of(tier, 2).read_bytes())
    get(tier, 3)
    assert tier.stats().integrity_failures == 3
    path_of(tier, 3).unlink()
    assert get(tier, 3) == Miss(MissReason.ABSENT)
    assert tier.stats().integrity_failures == 3


def test_garbage_where_a_header_should_be_is_corrupt(tier: DiskTier) -> None:
    size = 64 - 8
    for text in (b"[1]", b"{}", b"null", b'{"__metadata__":3}', b"[" * size, b"\xff" * size):
        path_of(tier, 1).write_bytes(size.to_bytes(8, "little") + text.ljust(size))
        assert get(tier, 1) == Miss(MissReason.CORRUPT)


def test_a_damaged_file_stays_until_the_next_put_replaces_it(tier: DiskTier) -> None:
    path = path_of(tier, 1)
    path.write_bytes(b"nothing")
    assert isinstance(get(tier, 1), Miss)
    assert path.read_bytes() == b"nothing"
    tier.put(key_of(make(1)), make(1))
    assert isinstance(get(tier, 1), Hit)
    tier.check_integrity()


@pytest.fixture
def with_side(tier: DiskTier) -> bytes:
    """Segment 1 is stored again with side data; the file's content."""
    assert isinstance(tier.put(key_of(noted(1)), noted(1)), Stored)
    return path_of(tier, 1).read_bytes()


def test_side_data_cut_anywhere_are_never_a_segment(tier: DiskTier, with_side: bytes) -> None:
    header = parse(with_side, len(with_side))
    assert header.end - header.ids_end > 100
    for length in range(header.ids_end, len(with_side)):
        path_of(tier, 1).write_bytes(with_side[:length])
        assert get(tier, 1) == Miss(MissReason.TRUNCATED), f"cut at {length}"
    path_of(tier, 1).write_bytes(with_side + b"\x00")
    assert get(tier, 1) == Miss(MissReason.CORRUPT)
    assert others_are_intact(tier)


def test_one_flipped_bit_in_side_data_or_their_header_is_never_a_segment(tier: DiskTier, with_side: bytes) -> None:
    header = parse(with_side, len(with_side))
    for at in [*range(header.keys_at), *range(header.ids_end, header.end)]:
        flipped = bytearray(with_side)
        flipped[at] ^= 1 << (at % 8)
        path_of(tier, 1).write_bytes(flipped)
        assert isinstance(get(tier, 1), Miss), f"bit flipped in byte {at}"
    path_of(tier, 1).write_bytes(with_side)
    answer = get(tier, 1)
    assert isinstance(answer, Hit)
    assert same(answer.segment, noted(1))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("side.outside", {"shape": [5]}),
        ("side.outside", {"shape": [-4]}),
        ("side.outside", {"shape": [-2, -2]}),
        ("side.outside", {"shape": None}),
        ("side.outside", {"dtype": "F16"}),
        ("side.outside", {"dtype": "F8"}),
        ("side.outside", {"data_offsets": [0, 16]}),
        ("side.inter", {"shape": [1]}),
        ("side.digest", {"shape": [[2], 3]}),
    ],
)
def test_a_wrong_shape_or_place_of_side_data_is_corrupt_though_the_checksum_is_right(
    tier: DiskTier, with_side: bytes, name: str, change: dict[str, object]
) -> None:
    path_of(tier, 1).write_bytes(reseal(with_side, {}, {name: change}))
    assert get(tier, 1) == Miss(MissReason.CORRUPT)
    assert dict(tier.verify().reasons) == {"corrupt": 1}


def test_a_tensor_that_is_no_side_data_is_corrupt(tier: DiskTier, with_side: bytes) -> None:
    for old, new in ((b'"side.outside"', b'"outside.side"'), (b'"side.outside"', b'"side.out/../"')):
        path_of(tier, 1).write_bytes(reseal(with_side.replace(old, new), {}))
        assert get(tier, 1) == Miss(MissReason.CORRUPT)


def test_files_with_side_data_are_plain_safetensors_too(tier: DiskTier, with_side: bytes) -> None:
    with safe_open(path_of(tier, 1), "pt") as file:
        for name, tensor in noted(1).side.items():
            assert torch.equal(file.get_tensor(f"side.{name}"), tensor)


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [
        (torch.float32, "1ca4f80e5af2246d831738cbfd4618f15973237881450ac25f5a5a8b2c4866c4"),
        (torch.bfloat16, "9b8b6c47c53810f3e9b24ce6f4e43f9868e6143cc272fb099212564caeddac7c"),
    ],
)
def test_a_file_without_side_data_is_what_it_always_was(dtype: torch.dtype, digest: str) -> None:
    keys = (torch.arange(96).view(2, 2, 3, 8) / 8).to(dtype)
    values = (torch.arange(48).view(2, 2, 3, 4) / -4).to(dtype)
    segment = CompiledSegment((7, 8, 9), keys, values, 5, "ab")
    assert blake3(b"".join(encode(key_of(segment), segment))).hexdigest() == digest


def test_verify_names_the_damaged_and_repair_removes_only_them(tier: DiskTier) -> None:
    path_of(tier, 1).write_bytes(path_of(tier, 1).read_bytes()[:-1])
    flipped = bytearray(path_of(tier, 2).read_bytes())
    flipped[-1] ^= 4
    path_of(tier, 2).write_bytes(flipped)
    report = tier.verify()
    assert (report.checked, dict(report.reasons), report.removed) == (3, {"truncated": 1, "corrupt": 1}, 0)
    assert {key for key, _ in report.damaged} == {key_of(make(1)), key_of(make(2))}
    assert path_of(tier, 1).exists()
    assert tier.verify(repair=True).removed == 2
    assert tier.verify().checked == 1
    assert isinstance(get(tier, 3), Hit)
    tier.check_integrity()


def test_repair_also_forgets_what_memory_mapped_from_a_damaged_file(tmp_path: Path) -> None:
    with Store.open(tmp_path, 1 << 20) as store:
        store.put(key_of(make(1)), make(1))
        store.clear_memory()
        with store.fetch([wanted(make(1))]) as held:
            assert held[0].tier == "disk"
        assert store.disk is not None
        store.disk.files.path(key_of(make(1))).write_bytes(b"nothing")
        assert store.verify(repair=True).removed == 1
        assert not store.contains(key_of(make(1)))


def test_writing_into_a_segment_that_was_read_never_reaches_the_file(tier: DiskTier) -> None:
    before = path_of(tier, 1).read_bytes()
    answer = get(tier, 1)
    assert isinstance(answer, Hit)
    answer.segment.keys.zero_()
    assert path_of(tier, 1).read_bytes() == before
    again = get(tier, 1)
    assert isinstance(again, Hit)
    assert same(again.segment, make(1))


def test_files_are_plain_safetensors(tier: DiskTier) -> None:
    with safe_open(path_of(tier, 1), "pt") as file:
        assert torch.equal(file.get_tensor("keys"), make(1).keys)
        assert torch.equal(file.get_tensor("values"), make(1).values)
        assert tuple(file.get_tensor("ids").tolist()) == make(1).ids
        assert file.metadata()["version"] == "1"
        assert file.metadata()["digest"] == key_of(make(1)).digest


def test_the_same_segment_makes_the_same_bytes(tier: DiskTier, tmp_path: Path) -> None:
    other = DiskTier(tmp_path / "other")
    other.put(key_of(make(1)), make(1))
    other.close()
    assert other.files.path(key_of(make(1))).read_bytes() == path_of(tier, 1).read_bytes()


@pytest.mark.parametrize("marker", ['{"format": 2}', "not json", "[]", "{}"])
def test_a_store_of_another_format_is_refused(tmp_path: Path, marker: str) -> None:
    DiskTier(tmp_path).close()
    (tmp_path / "kvquilt-store.json").write_text(marker)
    with pytest.raises(StoreUnavailableError, match="format"):
        DiskTier(tmp_path)


def test_a_directory_of_a_later_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    with pytest.raises(StoreUnavailableError, match="format v2"):
        Store.open(tmp_path, 0)


def test_a_file_in_the_directory_s_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    for place in ("store", "store/below"):
        with pytest.raises(StoreUnavailableError, match="store directory"):
            Store.open(tmp_path / place, 0)


@pytest.mark.parametrize("digest", ["", "../../x", "ab", "A" * 64, "a" * 31])
def test_a_key_that_is_no_digest_never_becomes_a_path(tier: DiskTier, digest: str) -> None:
    with pytest.raises(InputError, match="key"):
        tier.get(SegmentKey("0" * 32, digest), ())
    with pytest.raises(InputError, match="key"):
        tier.get(SegmentKey(digest, "0" * 64), ())


def test_a_malformed_segment_is_refused_before_anything_is_written(tier: DiskTier) -> None:
    good = make(1)
    for bad in (
        CompiledSegment((1, 2), good.keys, good.values),
        CompiledSegment(good.ids, good.keys, good.values[:1]),
        CompiledSegment(good.ids, good.keys, good.values.half()),
        CompiledSegment(good.ids, good.keys.to(torch.complex64), good.values.to(torch.complex64)),
        CompiledSegment((1, 2, 3, 1 << 31), good.keys, good.values),
        replace(good, side={"Upper": torch.zeros(1)}),
        replace(good, side={"": torch.zeros(1)}),
        replace(good, side={"outside": torch.zeros(1, dtype=torch.complex64)}),
    ):
        with pytest.raises(InputError):
            tier.put(key_of(good), bad)
    assert isinstance(get(tier, 1), Hit)


def test_a_folder_with_something_else_in_it_is_no_store_and_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear all")
    with pytest.raises(StoreUnavailableError, match=r"letter\.txt"):
        Store.open(tmp_path, 1 << 20)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_side_data_cannot_be_changed_once_they_are_in_a_segment() -> None:
    mine = {"b": torch.zeros(1), "a": torch.ones(1)}
    segment = replace(make(1), side=mine)
    mine["c"] = torch.zeros(1)
    assert list(segment.side) == ["a", "b"], "in one order, so that equal segments give equal files"
    with pytest.raises(TypeError):
        segment.side["a"] = torch.zeros(1)  # type: ignore[index]
