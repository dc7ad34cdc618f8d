"""What reads prompts: a model, its store, the writers of documents; the way of one prompt is in `kvquilt.request`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvquilt.accounting import counted_flops, full_flops
from kvquilt.context import check_placed_fits
from kvquilt.errors import InputError
from kvquilt.identity import SegmentKey, namespace, segment_key
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.repair.presets import AUTO_ORDER, Method
from kvquilt.repair.written import split
from kvquilt.request import Request
from kvquilt.segment import CompiledSegment
from kvquilt.store import Layout, Store
from kvquilt.tokens import encoder
from kvquilt.writers.constant import Constant
from kvquilt.writers.link_tokens import LinkTokens
from kvquilt.writers.loaded import Usable, content_of, method_of
from kvquilt.writers.notebook import Notebook
from kvquilt.writers.recipe import Recipe
from kvquilt.writers.recipes import KINDS, Ingredients, check_recipe, recipe
from kvquilt.writers.together import compile_together
from kvquilt.writers.writer import Writer

_GIVE = "give its folder with --writer PATH or Engine.load(..., writer=PATH)"
_REPEAT = "\nRepeat the text above, word for word:\n"


@dataclass(frozen=True, slots=True)
class Reader:
    """What reading needs besides the prompt.

    Attributes:
        preamble: ids that the engine's own prompts begin with; compiled once, such a beginning is an exact prefix.
        writer: compiles documents, unless the method names a recipe.
        helper: a second, small model that selectors may ask.
        trained: trained writers by the name under which methods ask for them.
    """

    model: LanguageModel
    store: Store
    writer: Writer
    preamble: tuple[int, ...]
    helper: LanguageModel | None = None
    trained: Mapping[str, Usable] = field(default_factory=dict)
    _notebooks: dict[str, Notebook] = field(default_factory=dict, repr=False, compare=False)

    @property
    def auto_order(self) -> tuple[str, ...]:
        """What `auto` tries, first to last: methods of the trained writers, then those that need none."""
        return (*(method_of(name, writer) for name, writer in self.trained.items()), *AUTO_ORDER)

    @property
    def identities(self) -> frozenset[str]:
        """What a measurement of a trained writer's method holds for: name and digest, of all that are loaded."""
        return frozenset(f"{name} {content_of(writer)}" for name, writer in self.trained.items())

    def identity(self, method: Method) -> str:
        """That of the trained writer of the method's documents; "" where there is none."""
        writer = self.trained.get(method.writer)
        return "" if writer is None else f"{method.writer} {content_of(writer)}"

    def called(self, name: str) -> str:
        """The trained writer of that name as a ledger has it; "" where there is none."""
        if (writer := self.trained.get(name)) is None:
            return ""
        return f"{writer.kind} {content_of(writer)[:12]}" + (f" ({name})" if name != writer.kind else "")

    def layout(self, side: frozenset[str] = frozenset(), layers: int | None = None) -> Layout:
        """What a stored segment must look like to be usable by this model, with the side data that is needed.

        Args:
            layers: as many, if not as many as the model has.
        """
        c = self.model.capability
        return Layout(self.model.dtype, layers or c.layers, c.kv_heads, c.key_dim, c.value_dim, side)

    def key(self, ids: tuple[int, ...], tenant: str | None, writer: Writer | None = None) -> SegmentKey:
        return segment_key(self.model.fingerprint.digest, (writer or self.writer).digest, tenant, ids)

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name, behind the engine's opening where it has a shared prefix; "" for `writer`."""
        if not name:
            return Constant("the engine's own", self.writer)
        if (found := self.trained.get(name)) is not None:
            return Constant(name, found.inner if isinstance(found, LinkTokens) else found)
        if name in KINDS:
            rule = f"no trained writer of that name is loaded; there is {', '.join(self.trained) or 'none'}: {_GIVE}"
            raise InputError("writer", rule, name)
        check_recipe(name, self.trained)
        repeat = encoder(self.model.tokenizer).encode(_REPEAT)
        shared = self.writer.encoded_behind or self.preamble
        return recipe(name, Ingredients(shared, self.model.capability.max_length, repeat))

    def notes(self, tenant: str | None) -> Notebook:
        """What recipes remember about this tenant's documents."""
        space, model = namespace(tenant), self.model
        made = Notebook(self.store, space, model.fingerprint.digest, model.vocabulary)
        return self._notebooks.setdefault(space, made)

    def compiler(
        self,
        segments: Sequence[tuple[int, ...]],
        ledger: Ledger,
        writers: Sequence[Writer],
        compiled: Callable[[Writer, CompiledSegment], object] | None = None,
    ) -> Callable[[list[int]], Iterator[tuple[int, CompiledSegment]]]:
        """What the store calls for segments it does not have; `writers[i]` compiles `segments[i]`.

        Args:
            compiled: told of every new segment once the store has it.
        """

        def compile_missing(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
            counter = RowCounter()
            mine = [segments[i] for i in missing]
            try:
                with ledger.stage("compile"):
                    for j, segment in compile_together(self.model, [writers[i] for i in missing], mine, counter):
                        yield missing[j], segment
                        if compiled is not None:
                            compiled(writers[missing[j]], segment)
            finally:
                ledger.forward_tokens["compile"] += counter.rows
                ledger.token_layers += counter.token_layers

        return compile_missing

    def noting(self, made: Recipe, tenant: str | None) -> Callable[[Writer, CompiledSegment], None]:
        """Lets the recipe note a new segment, and removes what it has given up for it."""
        notes = self.notes(tenant)

        def compiled(writer: Writer, segment: CompiledSegment) -> None:
            for old in made.compiled(notes, writer, segment):
                self.store.rm(key=self.key(segment.ids, tenant, old))

        return compiled

    def check(self, placement: Placement, method: Method, tenant: str | None = None, new: int = 0) -> None:
        """Raise `InputError` where the method's budget cannot pay for its probe, or `new` tokens do not fit behind."""
        apart = replace(self, _notebooks={namespace(tenant): self.notes(tenant).apart()})
        request = Request(apart, placement, method, 1, tenant)
        check_placed_fits(self.model.capability, request.placement, new)
        request.allowed(request.scene)

    def read(
        self,
        placement: Placement,
        method: Method,
        tenant: str | None,
        ledger: Ledger,
        room: int,
        logits: int = 1,
    ) -> tuple[torch.Tensor, SlotCache]:
        """Logits ``[logits, vocabulary]`` of the prompt's last rows and the cache behind them.

        Args:
            room: slots to reserve behind the prompt. The caller gives the cache back to the model's pool.

        Raises:
            InputError: the budget is smaller than what the method's probe costs.
        """
        request = Request(self, placement, method, logits, tenant)
        try:
            return request.read(ledger, room), request.scene.placed
        except BaseException:
            request.release()
            raise

    def extend(
        self, cache: SlotCache, new: list[int], method: str, ledger: Ledger, room: int
    ) -> tuple[torch.Tensor, SlotCache]:
        """Continue a live cache with the ids `new`: logits ``[1, vocabulary]`` and the cache, larger if need be.

        Args:
            method: what the earlier turns ran: a live cache is as good as the turns it grew from.
        """
        first = cache.filled
        known = max(first, cache.next_position)  # tokens so far: more than slots where some were dropped
        # soft rows are slots and no tokens, what cross layers see is tokens and no slots
        kept = first - ledger.soft_rows + (0 if cache.parts.cross is None else cache.parts.cross.tokens)
        counter = RowCounter()
        try:
            cache = self.model.pool.grow(cache, first + len(new) + room)
            with ledger.stage("read"):
                logits = self.model.portions(torch.tensor([new]), cache.tail(len(new)), cache, 1, counter)[0]
        except BaseException:
            self.model.pool.release(cache)
            raise
        ledger.forward_tokens["read"] += counter.rows
        ledger.token_layers += counter.token_layers
        ledger.tokens[Provenance.EXACT if split(method)[0] == "full" else Provenance.REUSED] += kept
        ledger.tokens[Provenance.ABSENT] += known - first
        ledger.tokens[Provenance.INLINE] += len(new)
        ledger.flops += counted_flops(self.model, counter)
        ledger.flops_full += full_flops(self.model, kept + known - first + len(new))
        return logits, cache
