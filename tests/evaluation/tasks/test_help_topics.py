"""Passages of the help topics: short prose, each once, and nothing of one split in another."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

import pytest

from kvquilt.document import check_documents
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.help_topics import HelpTopics

SPLITS = ("train", "tuning", "test")
MADE = {split: HelpTopics().documents(split) for split in SPLITS}


def topic(document_id: str) -> str:
    found = re.fullmatch(r"python-help-(.+)#\d+", document_id)
    assert found is not None
    return found.group(1)


def paragraphs(name: str) -> set[str]:
    return {" ".join(p.split()) for p in re.split(r"\n\s*\n", topics[name])}


@pytest.mark.parametrize("split", SPLITS)
def test_passages_are_short_prose_each_once(split: str) -> None:
    documents = check_documents(MADE[split])
    assert len({document.text for document in documents}) == len(documents)
    for document in documents:
        assert 320 <= len(document.text) <= 460
        assert sum(c.isalpha() or c.isspace() for c in document.text) >= 0.8 * len(document.text)
        assert topic(document.id) in topics
        last = document.text.rpartition("\n\n")[2].splitlines()[-1]
        assert last in topics[topic(document.id)], "passages are the topic's own lines"


def test_there_is_enough_of_each() -> None:
    assert len(MADE["train"]) > 300
    assert len(MADE["tuning"]) > 30
    assert len(MADE["test"]) > 100


@pytest.mark.parametrize("random_seed", [0, 1])
def test_splits_share_no_topic_and_no_long_paragraph(random_seed: int) -> None:
    task = HelpTopics(random_seed)
    names = {split: {topic(document.id) for document in task.documents(split)} for split in SPLITS}
    for one, other in (("train", "tuning"), ("train", "test"), ("tuning", "test")):
        assert not names[one] & names[other]
        left, right = (set().union(*map(paragraphs, names[split])) for split in (one, other))
        assert max((len(text) for text in left & right), default=0) < 60


def test_topics_do_share_paragraphs() -> None:
    """What the split guards against is there: without it, the chapter on compound statements would leak."""
    assert max(len(text) for text in paragraphs("compound") & paragraphs("with")) >= 60


def test_seeds_change_the_split_and_nothing_else() -> None:
    assert HelpTopics().documents("test") == MADE["test"]
    other = HelpTopics(1).documents("test")
    assert {d.id for d in other} != {d.id for d in MADE["test"]}


def test_sentences_are_whole_and_stand_in_one_split() -> None:
    made = {split: HelpTopics().sentences(split) for split in SPLITS}
    for sentences in made.values():
        assert len(set(sentences)) == len(sentences)
        assert all(re.fullmatch(r"[A-Z][^\n]{18,318}[.!?]", sentence) for sentence in sentences)
    assert sum(map(len, made["test"])) > 40_000
    long = {split: {s for s in sentences if len(s) >= 60} for split, sentences in made.items()}
    assert not long["train"] & long["test"]
    assert not long["tuning"] & long["test"]


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(InputError, match=r"did you mean 'train'"):
        HelpTopics().documents("training")
