"""Compiling segments of several writers in one go, so that what they are encoded behind is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.segment import CompiledSegment
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.prefix_cache import PrefixCache
from kvquilt.writers.writer import Writer


def compile_together(
    model: LanguageModel,
    writers: Sequence[Writer],
    segments: Sequence[tuple[int, ...]],
    counter: RowCounter | None = None,
) -> Iterator[tuple[int, CompiledSegment]]:
    """Compile ``segments[i]`` by ``writers[i]``; as `Writer.compile` otherwise.

    They are taken in the order of what they are encoded behind: neighbours share the beginning of the prefix, and
    where each of some documents is encoded behind the ones before it, that is one forward over all of them. One
    prefix is kept at a time.
    """
    jobs: dict[tuple[Isolated, int], list[int]] = {}
    others: dict[Writer, list[int]] = {}  # they bring what they encode behind themselves
    for i, writer in enumerate(writers):
        if isinstance(writer, Isolated):
            jobs.setdefault((writer, i if writer.extras else -1), []).append(i)  # with extras, one at a time anyway
        else:
            others.setdefault(writer, []).append(i)

    def reached(job: tuple[tuple[Isolated, int], list[int]]) -> tuple[tuple[int, ...], int]:
        (writer, _), indices = job
        return writer.prefix + (segments[indices[0]] if writer.extras else ()), indices[0]

    with PrefixCache(model, counter) as prefix:
        for (writer, _), indices in sorted(jobs.items(), key=reached):
            for j, segment in writer.compile_behind(prefix, [segments[i] for i in indices]):
                yield indices[j], segment
    for other, indices in others.items():
        for j, segment in other.compile(model, [segments[i] for i in indices], counter):
            yield indices[j], segment
