"""Compiling a user's documents: what is stored already is left alone, the rest is written portion by portion."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvquilt.context import check_document_fits
from kvquilt.gate_report import DoctorReport
from kvquilt.ledger import Ledger
from kvquilt.prompt import Document, segment_ids
from kvquilt.reading import Reader
from kvquilt.segment import CompiledSegment
from kvquilt.store import Store
from kvquilt.writers.encoder import depth
from kvquilt.writers.loaded import soft_rows
from kvquilt.writers.trained import Trained

log = logging.getLogger(__name__)
Compile = Callable[[list[int]], Iterator[tuple[int, CompiledSegment]]]
_PORTION = 64  # segments of a finished portion need not stay in memory while the next is compiled


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What `Engine.compile` did.

    Attributes:
        documents: all of them; `compiled` now, `stored_before` by anyone.
        tokens: of all documents; `bytes` of keys and values of their distinct segments.
        seconds: without the gate, storing included.
        forward_tokens: rows that passed the model, counted by hooks, padding of batches included.
        failures: segments that no longer could be stored, by tier and reason; they are compiled again when needed.
        gate: the closing measurement, if there was one.

    What was stored before is not read here: `kvquilt store verify` does that, and a damaged segment is a miss later.
    """

    documents: int
    compiled: int
    stored_before: int
    tokens: int
    bytes: int
    seconds: float
    forward_tokens: int
    failures: dict[str, int] = field(default_factory=dict)
    gate: DoctorReport | None = None


def compile_documents(
    reader: Reader,
    documents: Sequence[Document],
    tenant: str | None,
    progress: Callable[[int, int], None] | None = None,
    recipe: str = "",
) -> CompileReport:
    """Compile what is not stored. Every finished segment is stored at once, so an interrupted call resumes.

    Raises:
        ContextLengthError: a document longer than the model's context; nothing has been compiled then.
    """
    model, ledger = reader.model, Ledger()
    segments = [segment_ids(d, model.tokenizer) for d in documents]
    beside, trained = len(reader.writer.encoded_behind or ()), reader.trained.get(recipe)
    if isinstance(trained, Trained):
        beside = len(trained.prefix) + soft_rows(trained)
    for document, ids in zip(documents, segments, strict=True):
        check_document_fits(model.capability, document, len(ids), beside)
    made = reader.recipe(recipe)
    writers = made.prepare(reader.notes(tenant), segments)
    noting = reader.noting(made, tenant)
    keys = [reader.key(s, tenant, w) for s, w in zip(segments, writers, strict=True)]
    rows = [w.around[0] + s + w.around[1] for s, w in zip(segments, writers, strict=True)]
    # one text under two ids is one segment and counts for both
    copies = Counter(keys)
    at = {key: i for i, key in enumerate(keys)}
    # the slowest tier keeps things: what is in memory only, since the disk was full, is written down now
    missing = [at[key] for key in copies if not reader.store.keeps(key)]
    before, done = len(keys) - sum(copies[keys[i]] for i in missing), 0
    failures = _failures(reader.store)
    report = progress or (lambda done, total: None)
    report(before, len(keys))
    with ledger.stage("total"):
        for first in range(0, len(missing), _PORTION):
            part = missing[first : first + _PORTION]
            mine = [segments[i] for i in part]
            compile_missing = reader.compiler(mine, ledger, [writers[i] for i in part], noting)

            def counted(
                indices: list[int], part: list[int] = part, inner: Compile = compile_missing
            ) -> Iterator[tuple[int, CompiledSegment]]:
                nonlocal done
                for index, segment in inner(indices):
                    yield index, segment
                    done += copies[keys[part[index]]]
                    report(before + done, len(keys))

            wanted = [(keys[i], rows[i]) for i in part]
            layouts = [reader.layout(made.side, depth(writers[i])) for i in part]
            with reader.store.fetch(wanted, counted, layout=layouts) as held:
                for (key, _), found in zip(wanted, held, strict=True):
                    if found.segment is not None and not reader.store.keeps(key):
                        reader.store.put(key, found.segment)
    reader.store.flush()
    if before + done < len(keys):  # somebody else stored the rest meanwhile
        report(len(keys), len(keys))
    new = _failures(reader.store) - failures
    if new:
        log.warning("segments could not be stored: %s", ", ".join(f"{k} {n}" for k, n in new.items()))
    return CompileReport(
        documents=len(documents),
        compiled=done,
        stored_before=len(keys) - done,
        tokens=sum(len(s) for s in segments),
        bytes=sum(len(rows[i]) * reader.layout(layers=depth(writers[i])).bytes_per_token for i in at.values()),
        seconds=ledger.seconds["total"],
        forward_tokens=ledger.forward_tokens["compile"],
        failures=dict(new),
    )


def _failures(store: Store) -> Counter[str]:
    """Refused writes so far, by tier and reason."""
    return Counter(
        {f"{tier} {reason}": count for tier, stats in store.stats().items() for reason, count in stats.failures.items()}
    )
