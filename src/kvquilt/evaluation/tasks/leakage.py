"""What evaluates must not tune or train: two sets of items held apart, and a manifest to refuse documents by.

A document is known by its words: case and blanks do not count. One that begins with a line of its own, a title or a
date, is also known by what follows, so that a paragraph is found again with and without its title.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blake3 import blake3

from kvquilt.document import Document
from kvquilt.errors import LeakageError
from kvquilt.evaluation.tasks.item import Item

_LEAST = 100  # characters of what follows a first line, below which two documents may have it in common by chance
_NAMED = 3  # of what is shared, in the message


def manifest(items: Iterable[Item]) -> frozenset[str]:
    """Digests of all documents of the items: what nothing may be trained, calibrated or tuned on that holds one."""
    return known(document for item in items for document in item.documents)


def known(documents: Iterable[Document]) -> frozenset[str]:
    """A manifest of documents."""
    return frozenset(digest for document in documents for digest in digests(document.text))


def digests(text: str) -> tuple[str, ...]:
    """What a manifest knows a document's text by: blake3 in hexadecimal, one or two."""
    _, _, rest = text.strip().partition("\n")
    texts = [normalised(text)]
    if len(body := normalised(rest)) >= _LEAST:
        texts.append(body)
    return tuple(blake3(each.encode()).hexdigest() for each in texts)


def check_documents_apart(field: str, documents: Iterable[Document], refused: frozenset[str]) -> None:
    """Nothing of a manifest stands in what is trained on.

    Raises:
        LeakageError: names the documents, by id, and `field`.
    """
    shared = tuple(dict.fromkeys(d.id for d in documents if not refused.isdisjoint(digests(d.text))))
    _refuse(field, {"documents": shared})


def check_apart(first: Sequence[Item], second: Sequence[Item]) -> None:
    """The items have no document, no question and no group in common. Groups are compared within a task.

    Raises:
        LeakageError: names what is shared: documents by the ids that `first` gives them, questions by those of its
            items, groups by name.
    """
    refused = manifest(second)
    documents = dict.fromkeys(
        document.id for item in first for document in item.documents if not refused.isdisjoint(digests(document.text))
    )
    asked = {normalised(item.question) for item in second}
    questions = [item.id for item in first if normalised(item.question) in asked]
    held = {(item.task, item.group) for item in second}
    groups = dict.fromkeys(item.group for item in first if (item.task, item.group) in held)
    _refuse("items", {"documents": tuple(documents), "questions": tuple(questions), "groups": tuple(groups)})


def normalised(text: str) -> str:
    """The words alone: case folded, single blanks."""
    return " ".join(text.casefold().split())


def _refuse(field: str, shared: dict[str, tuple[str, ...]]) -> None:
    found = {kind: names for kind, names in shared.items() if names}
    if found:
        raise LeakageError(
            field, f"must be apart, but share {'; '.join(_some(*each) for each in found.items())}", found
        )


def _some(kind: str, names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{kind} {', '.join(names[:_NAMED])}{more}"
