"""Documents as the methods of a run want them compiled, and in memory, before anybody's clock starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvquilt.compiling import compile_documents
from kvquilt.document import Document
from kvquilt.ledger import Ledger
from kvquilt.prompt import segment_ids
from kvquilt.repair.presets import Method
from kvquilt.request import OPENING
from kvquilt.writers.constant import Constant
from kvquilt.writers.encoder import depth
from kvquilt.writers.writer import Writer

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(eq=False, slots=True)
class Preparation:
    """For one run.

    Attributes:
        methods: of all its arms.
    """

    engine: Engine
    tenant: str | None
    methods: Sequence[Method]
    _recipes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._recipes = tuple(dict.fromkeys(method.writer for method in self.methods if method.reuses))

    def ahead(self, documents: Sequence[Document]) -> None:
        """Compile all documents of the run where a recipe looks at more than the one it compiles.

        One that looks for neighbours must not find, and remember, only those of one prompt; one that encodes documents
        behind each other must not do so in the very order of a prompt, which would make it full prefill there.
        """
        different = list({(d.text, d.end): d for d in documents}.values())
        random.Random(0).shuffle(different)
        for name in self._recipes:
            if not isinstance(self.engine.reader.recipe(name), Constant):
                compile_documents(self.engine.reader, different, self.tenant, recipe=name)

    def of(self, documents: Sequence[Document]) -> dict[str, float]:
        """Compile the documents of one item, and have them in memory; seconds by recipe, 0 for what was stored."""
        seconds = {}
        for name in self._recipes:
            report = compile_documents(self.engine.reader, documents, self.tenant, recipe=name)
            seconds[name] = report.seconds if report.compiled else 0.0
            self._warm(name, documents)
        return seconds

    def _warm(self, name: str, documents: Sequence[Document]) -> None:
        """Every arm then reads from the same tier, whoever wrote the segments, in whatever sitting."""
        reader = self.engine.reader
        segments = [segment_ids(document, reader.model.tokenizer) for document in documents]
        writers: list[Writer] = [*reader.recipe(name).prepare(reader.notes(self.tenant), segments)]
        if reader.preamble:
            segments, writers = [reader.preamble, *segments], [OPENING, *writers]
        pairs = list(zip(segments, writers, strict=True))
        wanted = [(reader.key(ids, self.tenant, w), w.around[0] + ids + w.around[1]) for ids, w in pairs]
        layouts = [reader.layout(w.side, depth(w)) for w in writers]
        with reader.store.fetch(wanted, reader.compiler(segments, Ledger(), writers), layout=layouts):
            pass
