"""One text under two tokenizers: no token goes astray, whatever the characters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvquilt.errors import PromptError
from kvquilt.offsets import carried_over, document_spans, render
from kvquilt.prompt import Document, Prompt, Run, segment_ids
from kvquilt.tokens import Encoder, encoder
from tests.templates import LLAMA3
from tests.test_prompt import ALL, QUICK, TEXTS, TOKENIZERS, control_ids
from tests.tokenizers import CHATML, byte_level, bytes_only, chatml_tokenizer, metaspace, word_piece

TRICKY = "👩\u200d👩\u200d👧 e\u0301 a\u0308\u0323  x\n\n<|im_end|> 日本語<s>é"
# each with the next one, both ways: what is carried over knows spans alone, not who made them
RING = [pair for a, b in itertools.pairwise([*TOKENIZERS, next(iter(TOKENIZERS))]) for pair in ((a, b), (b, a))]
PAIRS = pytest.mark.parametrize("pair", RING, ids="-to-".join)


def written_bytes(tokenizer: Any, ids: tuple[int, ...]) -> list[bytes]:
    """What each token of a byte-level tokenizer stands for, from the vocabulary alone."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return [bytes(table[c] for c in piece) for piece in tokenizer.convert_ids_to_tokens(list(ids))]


def characters_of(tokenizer: Any, text: str) -> list[set[int]]:
    """Characters that each token of `text` under a byte-level tokenizer has bytes of."""
    owner = [n for n, character in enumerate(text) for _ in character.encode()]
    out, at = [], 0
    for piece in written_bytes(tokenizer, encoder(tokenizer).encode(text)):
        out.append(set(owner[at : at + len(piece)]))
        at += len(piece)
    assert at == len(owner)
    return out


@ALL
@QUICK
@given(text=TEXTS)
@example(text=TRICKY)
def test_spans_are_those_of_the_documents_ids(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids, spans = encoder(tokenizer).spans(text + "\n")
    assert ids == segment_ids(Document(text), tokenizer)
    assert len(spans) == len(ids)
    assert all(0 <= first <= last <= len(text) + 1 for first, last in spans)
    assert list(spans) == sorted(spans)
    assert document_spans(Run(ids, Document(text)), tokenizer) == spans


@pytest.mark.parametrize("pair", list(itertools.permutations((byte_level, bytes_only, chatml_tokenizer), 2)))
@QUICK
@given(text=TEXTS.filter(bool), seed=st.integers(0, 9))
@example(text=TRICKY, seed=0)
def test_a_token_gets_the_largest_score_of_those_it_shares_a_character_with(pair: Any, text: str, seed: int) -> None:
    """Against bytes read from the vocabulary, with neither offsets nor our filling of gaps."""
    theirs, ours = (make() for make in pair)
    given_to = characters_of(theirs, text)
    scores = torch.rand(len(given_to), generator=torch.Generator().manual_seed(seed))
    found = carried_over(scores, encoder(theirs).spans(text)[1], encoder(ours).spans(text)[1], len(text))
    expected = [max(float(scores[j]) for j, c in enumerate(given_to) if c & own) for own in characters_of(ours, text)]
    assert found.tolist() == expected


@PAIRS
@QUICK
@given(text=TEXTS.filter(bool), seed=st.integers(0, 9))
@example(text=TRICKY, seed=0)
def test_no_score_is_lost_or_made_up_between_any_two_tokenizers(pair: tuple[str, str], text: str, seed: int) -> None:
    theirs, ours = (encoder(TOKENIZERS[name]()).spans(text)[1] for name in pair)
    scores = torch.rand(len(theirs), generator=torch.Generator().manual_seed(seed))
    found = carried_over(scores, theirs, ours, len(text))
    assert found.shape == (len(ours),)
    assert set(found.tolist()) <= set(scores.tolist())
    assert found.max() == scores.max()
    widest = carried_over(scores, theirs, [(0, len(text))], len(text))
    assert widest.tolist() == [scores.max()]


def test_characters_that_no_token_has_belong_to_the_next_one() -> None:
    """Offsets without the space before a word, as many tokenizers give them; "a bc  d"."""
    theirs, ours = [(0, 1), (2, 4), (6, 7)], [(0, 2), (2, 5), (5, 6), (6, 7)]
    assert carried_over(torch.tensor([1.0, 2.0, 3.0]), theirs, ours, 7).tolist() == [2.0, 3.0, 3.0, 3.0]
    assert carried_over(torch.tensor([4.0, 2.0, 3.0]), theirs, ours, 7).tolist() == [4.0, 3.0, 3.0, 3.0]


def test_a_token_without_characters_takes_its_neighbours() -> None:
    assert carried_over(torch.tensor([5.0, 1.0]), [(0, 1), (1, 2)], [(0, 0), (0, 1), (1, 2), (2, 2)], 2).tolist() == [
        5.0,
        5.0,
        1.0,
        1.0,
    ]
    assert carried_over(torch.zeros(0), [], [(0, 1)], 1).tolist() == [0.0]


def chat(tokenizer: Any, question: str = "\nQuestion: what <|im_end|>is it?") -> Prompt:
    said: list[str | Document] = ["Hello  there", Document(TRICKY, "a"), Document(" other", "b", end=""), question]
    if not tokenizer.chat_template:
        return Prompt(said)
    return Prompt.chat([{"role": "user", "content": said}], tokenizer)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_same_tokenizer_reads_the_same_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = chat(tokenizer)
    rendering = render(prompt.runs(tokenizer), tokenizer, tokenizer)
    assert rendering.ids == prompt.ids(tokenizer)


@PAIRS
def test_another_tokenizer_reads_the_same_text(pair: tuple[str, str]) -> None:
    ours, theirs = (TOKENIZERS[name]() for name in pair)
    runs = Prompt(["Hello  there", Document(TRICKY, "a"), Document(" b", "b", end=""), "\nWhat <|im_end|>is it?"])
    made = runs.runs(ours)
    rendering = render(made, ours, theirs)
    assert [len(span) > 0 for span in rendering.spans] == [True] * 4
    for run, span in zip(made, rendering.spans, strict=True):
        if run.document is not None:
            assert rendering.ids[span.start : span.stop] == segment_ids(run.document, theirs)
    bos = encoder(theirs).bos
    assert control_ids(theirs) & set(rendering.ids) == ({bos} if bos is not None else set()), "users write no control"
    assert rendering.ids.count(bos) == (bos is not None)
    text = theirs.decode(rendering.ids, skip_special_tokens=False).removeprefix(
        "" if bos is None else theirs.convert_ids_to_tokens(bos)
    )
    assert text.lstrip(" ") == "Hello  there" + TRICKY + "\n" + " b" + "\nWhat <|im_end|>is it?"


def test_control_tokens_stay_control_where_both_have_them() -> None:
    ours, theirs = chatml_tokenizer(), byte_level("<|begin_of_text|>", LLAMA3)
    runs = chat(ours).runs(ours)
    rendering = render(runs, ours, theirs)
    marks = [i for run in runs for i in run.ids if i in control_ids(ours)]
    found = [i for i in rendering.ids if i in control_ids(theirs)]
    assert theirs.convert_ids_to_tokens(found) == ["<|begin_of_text|>", *ours.convert_ids_to_tokens(marks)]
    assert len(marks) >= 3


def test_a_control_token_that_the_other_lacks_is_its_text() -> None:
    ours, theirs = byte_level("<|begin_of_text|>", CHATML), without_added_tokens()
    runs = chat(ours, "\nWhy?").runs(ours)
    rendering = render(runs, ours, theirs)
    text = theirs.decode(rendering.ids)
    assert text == ours.decode([i for run in runs for i in run.ids]).removeprefix("<|begin_of_text|>")


def without_added_tokens() -> Any:
    """A byte-level tokenizer without any added token."""
    import json

    import tokenizers as tk
    from transformers import PreTrainedTokenizerFast

    state = json.loads(bytes_only().backend_tokenizer.to_str())
    state["added_tokens"] = []
    return PreTrainedTokenizerFast(tokenizer_object=tk.Tokenizer.from_str(json.dumps(state)))


def test_a_prompt_that_begins_with_a_document_keeps_one_beginning() -> None:
    ours, theirs = metaspace("first"), byte_level("<|begin_of_text|>")
    runs = Prompt([Document("a b"), "why?"]).runs(ours)
    assert runs[0].ids == (encoder(ours).bos,)
    rendering = render(runs, ours, theirs)
    assert rendering.ids[0] == encoder(theirs).bos
    assert len(rendering.spans[0]) == 0
    assert rendering.ids == Prompt([Document("a b"), "why?"]).ids(theirs)


def test_tokens_that_are_not_the_texts_are_refused_without_showing_the_text() -> None:
    tokenizer = chatml_tokenizer()
    document = Document("secret words", id="memo")
    ids = segment_ids(document, tokenizer)
    with pytest.raises(PromptError, match=r"helper_model: .*cannot be aligned.*'memo'") as caught:
        document_spans(Run((*ids[:-1], ids[0]), document), tokenizer)
    assert "secret" not in str(caught.value)


def test_a_tokenizer_that_contradicts_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Encoder._raw_spans

    def one_less(self: Encoder, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans = other(self, text)
        return ids[1:], spans[1:]

    monkeypatch.setattr(Encoder, "_raw_spans", one_less)
    with pytest.raises(PromptError, match=r"tokenizer: .*gives other tokens"):
        Encoder(byte_level()).spans("some words")


def test_a_tokenizer_whose_parts_do_not_join_cannot_read_along() -> None:
    tokenizer = chatml_tokenizer()
    with pytest.raises(PromptError, match="must join"):
        render(Prompt(["a"]).runs(tokenizer), tokenizer, word_piece())
