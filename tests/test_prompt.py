"""Prompts and their ids: nothing of a user's text is lost, added or taken for control."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.document import check_documents
from kvquilt.errors import InputError, PromptError
from kvquilt.prompt import Document, Inline, Prompt, segment_ids
from kvquilt.tokens import Encoder
from tests.templates import styled
from tests.tokenizers import CONTROL, byte_level, bytes_only, chatml_tokenizer, metaspace, unigram, word_piece

TOKENIZERS = {
    "byte-level": byte_level,
    "byte-level-bos": lambda: byte_level("<|begin_of_text|>"),
    "chatml": chatml_tokenizer,
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-normalizer": lambda: metaspace("normalizer"),
    "unigram": unigram,
}
ALL = pytest.mark.parametrize("name", TOKENIZERS)
QUICK = settings(max_examples=40, deadline=None, derandomize=True, database=None)

# U+2581 is how sentencepiece-like vocabularies write a space: such tokenizers read it as one, which no prompt can help
_CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\x00\u2581")
_PIECES = st.sampled_from(
    ["", " ", "   ", "\n", "\n\n\n", "\t", "\r\n", "今日は", "良い天気です。", "🙂", "👩\u200d👩\u200d👧", "é",
     "e\u0301", "Ünï", "word", " word", "<", "<s>", "<|im_end|>", "<|im_start|>system\n", "<|im_", "end|>", "<unk>",
     "</s>", "<think>", "<h1>", "[INST]"]
)  # fmt: skip
TEXTS = st.lists(st.one_of(_PIECES, st.text(_CHARACTERS, max_size=8)), max_size=6).map("".join)
PARTS = st.lists(
    st.one_of(TEXTS, st.builds(Document, TEXTS, end=st.sampled_from(["\n", "", "\n\n"]))), min_size=1, max_size=5
)


def control_ids(tokenizer: Any) -> set[int]:
    return {tokenizer.convert_tokens_to_ids(name) for name in CONTROL}


@ALL
@QUICK
@given(text=TEXTS)
def test_document_text_survives_byte_for_byte(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = segment_ids(Document(text), tokenizer)
    before = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([*before, *ids], clean_up_tokenization_spaces=False) == "x" + text + "\n"
    assert not control_ids(tokenizer) & set(ids)


@ALL
@QUICK
@given(parts=PARTS)
def test_ids_of_a_prompt_are_those_of_its_parts(name: str, parts: list[str | Document]) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = Prompt(parts)
    runs = prompt.runs(tokenizer)
    alone: list[int] = []
    for n, part in enumerate(parts):
        piece = [part] if n == 0 else [Document("", end=""), part]  # what does not open a prompt
        alone += [i for i in Prompt(piece).ids(tokenizer) if i not in control_ids(tokenizer)]
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    assert [i for run in runs for i in run.ids] == bos + alone
    assert prompt.ids(tokenizer) == tuple(bos + alone)
    assert all(run.ids for run in runs)
    assert all(a.document or b.document for a, b in itertools.pairwise(runs))
    for run in runs:
        assert run.document is None or run.ids == segment_ids(run.document, tokenizer)


@ALL
@pytest.mark.parametrize(
    "parts",
    [
        [Document("d")],
        [Document("<s><|begin_of_text|>"), "q"],
        ["", Document("d"), "q"],
        ["<s> <|begin_of_text|>", Document("d")],
        ["s", Document("a"), "t", Document("b")],
        [Document("", end="")],
        [Inline("<s>", control=True), "hello"],
    ],
)
def test_one_beginning_of_text_wherever_the_documents_stand(name: str, parts: list[Any]) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = Prompt(parts).ids(tokenizer)
    opens = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    written = isinstance(parts[0], Inline) and tokenizer.bos_token == "<s>"
    assert ids.count(tokenizer.bos_token_id) == int(opens or written)
    assert not opens or ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("style", ["llama3", "mistral", "gemma"])
def test_a_template_that_writes_its_beginning_of_text_gets_no_second(style: str) -> None:
    tokenizer = styled(style)
    for content in ("q", Document("d"), [Document("d"), "q", Document("<s>")]):
        ids = Prompt.chat([{"role": "user", "content": content}], tokenizer).ids(tokenizer)
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("tokens", [1, 255, 256, 257])
def test_documents_of_any_length_are_runs_of_exactly_their_ids(tokens: int) -> None:
    tokenizer = bytes_only("<s>")
    document = Document("a" * (tokens - 1))
    runs = Prompt(["before", document, "after"]).runs(tokenizer)
    assert [len(run.ids) for run in runs] == [7, tokens, 5]
    assert runs[1].ids == (*b"a" * (tokens - 1), 10)


def test_an_empty_document_keeps_its_place_and_its_end() -> None:
    tokenizer = bytes_only()
    runs = Prompt(["a", Document("", id="e"), "b", Document("", id="f", end=""), "c"]).runs(tokenizer)
    assert [(run.ids, run.document and run.document.id) for run in runs] == [
        ((97,), None),
        ((10,), "e"),
        ((98, 99), None),
    ]


def test_a_base_models_prompt() -> None:
    tokenizer = bytes_only()
    prompt = Prompt.plain("Facts.", [Document("A is B."), Document("C is D.")], "What is A?")
    text = bytes(prompt.ids(tokenizer)).decode()
    assert text == "Facts.\n\nA is B.\nC is D.\n\nQuestion: What is A?\nAnswer:"
    assert Prompt.plain("", [Document("d")], "q").parts[0] == Document("d")


@pytest.mark.parametrize("name", ["metaspace-always", "metaspace-first", "metaspace-normalizer", "unigram"])
def test_only_the_opening_text_gets_the_tokenizers_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = Prompt(["fox", Document("fox", end=""), "fox"]).ids(tokenizer)
    assert tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) == "foxfoxfox"
    assert list(ids[: len(tokenizer("fox")["input_ids"])]) == tokenizer("fox")["input_ids"]


def test_template_text_behind_a_control_token_reads_as_in_the_whole_template() -> None:
    for scheme in ("always", "first"):
        tokenizer = metaspace(scheme)
        text = "<|im_end|>user said"
        whole = tokenizer(f"fox{text}", add_special_tokens=False)["input_ids"]
        assert Prompt(["fox", Inline(text, control=True)]).ids(tokenizer)[1:] == tuple(whole)


def test_tokenizers_that_write_between_parts_are_refused() -> None:
    with pytest.raises(PromptError, match="must join"):
        Prompt(["a"]).ids(word_piece())


def test_a_control_token_of_one_character_in_user_text_is_refused() -> None:
    tokenizer = byte_level(template="never used")
    tokenizer.add_tokens(["\u2620"], special_tokens=False)
    tokenizer.chat_template = "\u2620{{ messages[0].content }}"
    assert Prompt([Inline("\u2620", control=True)]).ids(tokenizer) == (tokenizer.convert_tokens_to_ids("\u2620"),)
    with pytest.raises(PromptError, match="control token"):
        Prompt(["skull \u2620"]).ids(tokenizer)


def test_added_tokens_count_as_control_only_if_the_template_writes_them() -> None:
    think, heading = (bytes_only().convert_tokens_to_ids(name) for name in ("<think>", "<h1>"))
    assert {think, heading} <= set(Prompt(["<think><h1>"]).ids(bytes_only()))
    ids = Prompt(["<think><h1>"]).ids(styled("thinking"))
    assert think not in ids
    assert heading in ids


def test_threads_never_see_each_others_control_tokens() -> None:
    tokenizer = chatml_tokenizer()
    encoder, control = Encoder(tokenizer), control_ids(tokenizer)
    wrong: list[int] = []

    def work(parse: bool) -> None:
        for _ in range(300):
            found = control & set(encoder.encode("a <|im_end|> b", control=parse))
            if bool(found) != parse:
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_document_defaults_and_equality() -> None:
    document = Document("some text")
    assert document == Document("some text", id=document.id, score=3)
    assert document.id.startswith("doc-")
    assert len(document.id) == 16
    assert document.id != Document("some text ").id
    assert "some text" not in repr(Prompt([document, "some text too"]))
    assert Document("x", score=2).score == 2.0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": b"x"}, "Document.text"),
        ({"text": None}, "Document.text"),
        ({"text": "a\x00b"}, "Document.text"),
        ({"text": "a\udc80b"}, "Document.text"),
        ({"text": "x", "id": ""}, "Document.id"),
        ({"text": "x", "id": " "}, "Document.id"),
        ({"text": "x", "id": 7}, "Document.id"),
        ({"text": "x", "end": None}, "Document.end"),
        ({"text": "x", "score": "high"}, "Document.score"),
        ({"text": "x", "score": float("nan")}, "Document.score"),
    ],
)
def test_malformed_documents_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as raised:
        Document(**fields)
    assert raised.value.field == field
    assert "a\x00b" not in str(raised.value)


@pytest.mark.parametrize(
    ("documents", "field", "rule"),
    [
        ([], "documents", "at least one"),
        ("text", "documents", "list of Document"),
        (Document("x"), "documents", "list of Document"),
        (None, "documents", "list of Document"),
        (["text"], "documents[0]", "must be a Document"),
        ([Document("x"), Document(" \n")], "documents[1].text", "not be empty"),
        ([Document("x"), Document("y"), Document("x")], "documents[2].id", "duplicate of documents[0]"),
        ([Document("x", id="a"), Document("y", id="a")], "documents[1].id", "with other text"),
        ([Document("x", id="a"), Document("x", id="a", end="")], "documents[1].id", "with other text"),
    ],
)
def test_lists_that_break_a_rule_are_named(documents: Any, field: str, rule: str) -> None:
    with pytest.raises(InputError) as raised:
        check_documents(documents)
    assert raised.value.field == field
    assert rule in str(raised.value)


def test_the_same_text_under_two_ids_is_allowed() -> None:
    documents = [Document("x", id="a"), Document("x", id="b")]
    assert check_documents(iter(documents)) == tuple(documents)


@pytest.mark.parametrize("parts", [[], "text", [3], None, [b"x"], Document("x"), ["a\x00"]])
def test_malformed_prompts_are_refused(parts: Any) -> None:
    with pytest.raises(InputError):
        Prompt(parts)
