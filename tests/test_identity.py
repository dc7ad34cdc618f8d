"""Keys: golden vectors, injectivity, and independence of the process that computes them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvquilt.identity as identity
from kvquilt.errors import InputError
from kvquilt.identity import Fingerprint, digest_fields, encode_ids, namespace, segment_key

_SCRIPT = """
import json
from kvquilt.identity import Fingerprint, namespace, segment_key
fingerprint = Fingerprint(weights="w" * 64, tokenizer="t" * 64, rope="r" * 64, dtype="bfloat16").digest
print(json.dumps([fingerprint, namespace(None), namespace(""), namespace("acme"),
    segment_key(fingerprint, "isolated", None, []).digest,
    segment_key(fingerprint, "isolated", "acme", [1, 2, 49151]).digest]))
"""
GOLDEN = [
    "46651f27e68a6e6adf6534dce89dab2eb97bec0a3e378e70f692b602f5052e60",
    "d78daf4ea227a4fa611498e4391e578a",
    "ba7f56ac624518ec979807079b5fef50",
    "1de9c81c2a76406bad1bc74565d99d3e",
    "36164e3fde2f8d0e15a3b3f1597b8429bf948d972da77c51b28db30a5472ca67",
    "7fc356cc865ece0635ae1251fca44de168f5ba82545d49be65354074c064bf92",
]


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_every_process_computes_the_golden_keys(seed: str) -> None:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == GOLDEN


def test_keys_are_long_enough() -> None:
    key = segment_key("f", "w", "tenant", [1])
    assert len(bytes.fromhex(key.digest)) == 32
    assert len(bytes.fromhex(key.namespace)) == 16


_TEXT = st.text(max_size=4)
_OPTIONAL = st.none() | _TEXT
_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
_KEY = st.tuples(_TEXT, _TEXT, _OPTIONAL, _IDS)


@given(_KEY, _KEY)
def test_distinct_assignments_have_distinct_keys(left: tuple, right: tuple) -> None:
    assert (segment_key(*left) == segment_key(*right)) == (left == right)


@given(_TEXT, _TEXT, _IDS)
def test_values_swapped_between_fields_change_the_key(one: str, two: str, ids: list[int]) -> None:
    assume(one != two)
    swaps = {(one, two, None), (two, one, None), (one, one, two), (two, two, one), (one, two, two), (two, one, one)}
    assert len({segment_key(*swap, ids).digest for swap in swaps}) == len(swaps)


@given(_TEXT, _TEXT)
def test_moving_a_character_over_a_field_boundary_changes_the_digest(one: str, two: str) -> None:
    assume(one)
    moved = digest_fields("context", [("a", one[:-1]), ("b", one[-1] + two)])
    assert moved != digest_fields("context", [("a", one), ("b", two)])


@given(_TEXT, _TEXT, _TEXT, _TEXT)
def test_every_field_of_a_fingerprint_counts(weights: str, tokenizer: str, rope: str, dtype: str) -> None:
    values = dict(zip([field.name for field in fields(Fingerprint)], (weights, tokenizer, rope, dtype), strict=True))
    digest = Fingerprint(**values).digest
    for name in values:
        assert Fingerprint(**values | {name: values[name] + "x"}).digest != digest


def test_ambiguous_neighbours_differ() -> None:
    contents: list[list[tuple[str, bytes | str | None]]] = [
        [("a", None)],
        [("a", "")],
        [("a", "\x00")],
        [],
        [("a", "b"), ("c", "d")],
        [("c", "d"), ("a", "b")],
        [("a", "bc"), ("", "d")],
        [("ab", "c"), ("", "d")],
        [("a", "b" + "\x01\x00\x00\x00c\x01")],
        [("a", encode_ids([1, 2]))],
        [("a", encode_ids([1])), ("a", encode_ids([2]))],
    ]
    digests = {digest_fields("context", content) for content in contents}
    assert len(digests) == len(contents)
    assert digest_fields("one", [("a", "b")]) != digest_fields("another", [("a", "b")])
    assert namespace(None) != namespace("")
    assert namespace("None") != namespace(None)


def test_text_and_its_bytes_are_the_same_value() -> None:
    assert digest_fields("c", [("a", "é")]) == digest_fields("c", [("a", "é".encode())])


def test_identity_uses_nothing_that_depends_on_the_process() -> None:
    tree = ast.parse(Path(identity.__file__).read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called.isdisjoint({"hash", "id", "repr", "set", "frozenset", "vars", "dir"})
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert attributes.isdisjoint({"__hash__", "__repr__", "__dict__"})
    conversions = [node for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) and node.conversion == 114]
    assert not conversions, "!r is repr"
    assert "blake3" in called


@pytest.mark.parametrize("tenant", [3, b"acme", ["acme"], "a\udc80"])
def test_a_tenant_that_is_no_text_is_an_input_error(tenant: object) -> None:
    for deed in (namespace, lambda t: segment_key("f", "w", t, [1])):
        with pytest.raises(InputError, match=r"^tenant: must be") as caught:
            deed(tenant)  # type: ignore[arg-type, no-untyped-call]
        assert caught.value.field == "tenant"
        assert caught.value.__cause__ is None
