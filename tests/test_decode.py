"""From logits to text: sampling, pieces of multi-byte characters, stop strings."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.decode import Detokeniser, Sampling, StopStrings
from kvquilt.errors import InputError
from tests.tokenizers import byte_level, chatml_tokenizer, metaspace, unigram

TOKENIZERS = {"byte-level": byte_level, "metaspace": metaspace, "unigram": unigram}
TEXTS = [
    "plain words, and more of them",
    "今日は良い天気です。日本語の文章。",
    "🙂🚀👩‍👩‍👧‍👦 mixed with words 🙂",
    "Ünïcödé naïve café \t tabs\r\nnew lines",
    "يمكن кириллица ไทย ελληνικά",
]


def streamed(tokenizer: object, ids: list[int]) -> list[str]:
    text = Detokeniser(tokenizer)  # type: ignore[arg-type]
    return [*(text.push(i) for i in ids), text.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_to_the_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokenizer, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_pieces_of_any_text_join_to_the_whole(text: str) -> None:
    tokenizer = chatml_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_a_character_cut_off_by_the_end_comes_out_at_the_flush() -> None:
    tokenizer = chatml_tokenizer()
    ids = tokenizer("ok 👽", add_special_tokens=False)["input_ids"]
    pieces = streamed(tokenizer, ids[:-1])
    assert "".join(pieces[:-1]) in ("ok ", "ok")
    assert "\ufffd" in pieces[-1]
    assert "".join(pieces) == tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)


def test_a_character_comes_as_soon_as_it_is_whole() -> None:
    tokenizer = chatml_tokenizer()
    ids = tokenizer("👽a", add_special_tokens=False)["input_ids"]
    assert len(ids) > 2
    assert streamed(tokenizer, ids) == [*[""] * (len(ids) - 2), "👽", "a", ""]


def test_control_tokens_are_not_text() -> None:
    tokenizer = chatml_tokenizer()
    control = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    assert "".join(streamed(tokenizer, [ids[0], control, *ids[1:]])) == "a b"


def cut(stop: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    cutter, out = StopStrings(stop), ""
    for piece in pieces:
        out += cutter.push(piece)
        if cutter.hit:
            return out, True
    return out + cutter.flush(), False


@pytest.mark.parametrize(
    ("stop", "pieces", "text", "hit"),
    [
        (("END",), ["abc", "END", "def"], "abc", True),
        (("END",), ["abE", "N", "Dx"], "ab", True),
        (("END",), ["abEN", "x"], "abENx", False),
        (("END",), ["abE", "N"], "abEN", False),
        (("END", "bE"), ["abE", "ND"], "a", True),
        (("\n\n",), ["one\n", "two\n", "\nthree"], "one\ntwo", True),
        (("aab",), ["aa", "ab"], "a", True),
        (("x",), ["x"], "", True),
        ((), ["any", "thing"], "anything", False),
    ],
)
def test_stop_strings_cut_across_pieces(stop: tuple[str, ...], pieces: list[str], text: str, hit: bool) -> None:
    assert cut(stop, pieces) == (text, hit)


@settings(max_examples=150, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_where_pieces_are_cut_does_not_matter(text: str, stop: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    out, hit = cut(tuple(stop), pieces)
    assert hit == bool(found)
    if not found:
        assert out == text
    else:
        # a stop string that ends earlier may be seen before a longer one that begins earlier is complete
        assert text.startswith(out)
        assert any(text.startswith(s, len(out)) for s in stop)


LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.9])


def drawn(sampling: Sampling, count: int = 300, logits: torch.Tensor = LOGITS) -> list[int]:
    generator = sampling.generator()
    return [sampling.pick(logits, generator) for _ in range(count)]


def test_temperature_zero_takes_the_largest() -> None:
    assert set(drawn(Sampling(top_k=3, top_p=0.5), 3)) == {1}


def test_top_k_keeps_that_many() -> None:
    assert set(drawn(Sampling(temperature=2.0, top_k=1, seed=1))) == {1}
    assert set(drawn(Sampling(temperature=2.0, top_k=2, seed=1))) == {1, 4}
    assert set(drawn(Sampling(temperature=5.0, top_k=99, seed=1))) == {0, 1, 2, 3, 4}
    assert set(drawn(Sampling(temperature=5.0, top_k=0, seed=1))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_with_that_mass() -> None:
    probabilities = LOGITS.softmax(-1)
    best = float(probabilities[1])
    assert set(drawn(Sampling(temperature=1.0, top_p=best - 0.01, seed=1))) == {1}
    assert set(drawn(Sampling(temperature=1.0, top_p=best + 0.01, seed=1))) == {1, 4}
    assert set(drawn(Sampling(temperature=1.0, top_p=1e-9, seed=1))) == {1}, "at least one always stays"
    assert set(drawn(Sampling(temperature=5.0, top_p=1.0, seed=1))) == {0, 1, 2, 3, 4}


def test_the_ends_of_the_seeds_and_tiny_temperatures_work() -> None:
    for seed in (0, (1 << 63) - 1):
        assert set(drawn(Sampling(temperature=1e-38, seed=seed), 3)) == {1}
        assert set(drawn(Sampling(temperature=1e-38, seed=seed), 3, LOGITS * 1e30)) == {1}


def test_draws_follow_the_distribution() -> None:
    for temperature in (0.7, 1.5):
        counts = torch.bincount(torch.tensor(drawn(Sampling(temperature=temperature, seed=3), 4000)), minlength=5)
        assert torch.allclose(counts / 4000, (LOGITS / temperature).softmax(-1), atol=0.03)


def test_a_seed_gives_the_same_draws_and_none_gives_others() -> None:
    one, two = Sampling(temperature=1.0, seed=7), Sampling(temperature=1.0, seed=8)
    assert drawn(one, 30) == drawn(one, 30) != drawn(two, 30)
    free = Sampling(temperature=1.0)
    assert drawn(free, 60) != drawn(free, 60)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")), ("top_p", None),
        ("top_k", -1), ("top_k", 1.5),
        ("max_new_tokens", 0), ("max_new_tokens", 2.5), ("max_new_tokens", True), ("max_new_tokens", "8"),
        ("seed", "one"), ("seed", 1.5), ("seed", -1), ("seed", 1 << 63), ("seed", True),
        ("stop", "END"), ("stop", ("",)), ("stop", (1,)),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{field}: must be") as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_sampling_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().seed = 1  # type: ignore[misc]
