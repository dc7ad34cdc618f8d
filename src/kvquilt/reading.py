"""From a placed prompt to its first logits: fetch or compile segments, assemble, choose, repair, account for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvquilt.accounting import Outcome, counted_flops, full_flops
from kvquilt.errors import InputError
from kvquilt.identity import SegmentKey, namespace, segment_key
from kvquilt.ledger import Ledger, Provenance, Spending
from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Order, Placement
from kvquilt.repair.operator import assemble, compact, repair
from kvquilt.repair.plan import cut, row_plan
from kvquilt.repair.presets import Method
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice
from kvquilt.segment import CompiledSegment
from kvquilt.store import Held, Layout, Store
from kvquilt.tokens import encoder
from kvquilt.writers.constant import Constant
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.notebook import Notebook
from kvquilt.writers.recipe import Chosen, Recipe
from kvquilt.writers.recipes import Ingredients, recipe
from kvquilt.writers.together import compile_together

_REPEAT = "\nRepeat the text above, word for word:\n"
OPENING = Isolated()  # compiles the prompt's opening: behind nothing, it is what full prefill computes


@dataclass(frozen=True, slots=True)
class Reader:
    """What reading needs besides the prompt.

    Attributes:
        preamble: ids that the engine's own prompts begin with; compiled once, such a beginning is an exact prefix.
        writer: compiles documents, unless the method names a recipe.
        helper: a second, small model that selectors may ask.
    """

    model: LanguageModel
    store: Store
    writer: Isolated
    preamble: tuple[int, ...]
    helper: LanguageModel | None = None
    _notebooks: dict[str, Notebook] = field(default_factory=dict, repr=False, compare=False)

    def layout(self, side: frozenset[str] = frozenset()) -> Layout:
        """What a stored segment must look like to be usable by this model, with the side data that is needed."""
        c = self.model.capability
        return Layout(self.model.dtype, c.layers, c.kv_heads, c.key_dim, c.value_dim, side)

    def key(self, ids: tuple[int, ...], tenant: str | None, writer: Isolated | None = None) -> SegmentKey:
        return segment_key(self.model.fingerprint.digest, (writer or self.writer).digest, tenant, ids)

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name, behind the engine's opening where it has a shared prefix; "" for `writer`."""
        if not name:
            return Constant("the engine's own", self.writer)
        repeat = encoder(self.model.tokenizer).encode(_REPEAT)
        shared = self.writer.prefix or self.preamble
        return recipe(name, Ingredients(shared, self.model.capability.max_length, repeat))

    def notes(self, tenant: str | None) -> Notebook:
        """What recipes remember about this tenant's documents."""
        space = namespace(tenant)
        return self._notebooks.setdefault(space, Notebook(self.store, space, self.model.fingerprint.digest))

    def compiler(
        self,
        segments: Sequence[tuple[int, ...]],
        ledger: Ledger,
        writers: Sequence[Isolated],
        compiled: Callable[[Isolated, CompiledSegment], object] | None = None,
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

    def noting(self, made: Recipe, tenant: str | None) -> Callable[[Isolated, CompiledSegment], None]:
        """Lets the recipe note a new segment, and removes what it has given up for it."""
        notes = self.notes(tenant)

        def compiled(writer: Isolated, segment: CompiledSegment) -> None:
            for old in made.compiled(notes, writer, segment):
                self.store.rm(key=self.key(segment.ids, tenant, old))

        return compiled

    def check(self, placement: Placement, method: Method) -> None:
        """Raise `InputError` where the method's budget cannot pay for its probe."""
        request = _Request(self, placement, method, 1, None)
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
        request = _Request(self, placement, method, logits, tenant)
        try:
            out = request.read(ledger, room)
        except BaseException:
            request.release()
            raise
        cache = request.scene.cache
        assert cache is not None  # `read` has placed it
        return out, cache

    def extend(
        self, cache: SlotCache, new: list[int], method: str, ledger: Ledger, room: int
    ) -> tuple[torch.Tensor, SlotCache]:
        """Continue a live cache with the ids `new`: logits ``[1, vocabulary]`` and the cache, larger if need be.

        Args:
            method: what the earlier turns ran: a live cache is as good as the turns it grew from.
        """
        first = cache.filled
        known = max(first, cache.next_position)  # tokens so far: more than slots where some were dropped
        counter = RowCounter()
        try:
            cache = self.model.pool.grow(cache, first + len(new) + room)
            with ledger.stage("read"):
                logits = self.model.forward(torch.tensor([new]), cache.tail(len(new)), cache, 1, counter)[0]
        except BaseException:
            self.model.pool.release(cache)
            raise
        ledger.forward_tokens["read"] += counter.rows
        ledger.token_layers += counter.token_layers
        ledger.tokens[Provenance.EXACT if method == "full" else Provenance.REUSED] += first
        ledger.tokens[Provenance.ABSENT] += known - first
        ledger.tokens[Provenance.INLINE] += len(new)
        ledger.flops += counted_flops(self.model, counter)
        ledger.flops_full += full_flops(self.model, known + len(new))
        return logits, cache


@dataclass(eq=False, slots=True)
class _Request:
    """One prompt while it is read; `scene.cache` is its cache from the moment there is one.

    Attributes:
        logits: how many of the last rows are run whatever they hold, since they predict what follows.
        exact: document runs behind the very tokens they were encoded behind; nothing is ever spent on them.
        opening: whether the prompt begins with the reader's preamble, which is compiled, too.
        scored: a first round of choosing is still to decide in which order the documents stand.
    """

    reader: Reader
    placement: Placement
    method: Method
    logits: int
    tenant: str | None
    recipe: Recipe = field(init=False)
    writers: dict[int, Chosen] = field(init=False)
    exact: set[int] = field(init=False)
    opening: bool = field(init=False)
    scored: bool = field(init=False)
    scene: Scene = field(init=False)
    held: Mapping[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe = self.reader.recipe(self.method.writer)
        first = self.placement.runs[0]
        self.opening = self.method.reuses and first.document is None and first.ids == self.reader.preamble
        # what is scored first is scored in local frames: every document at one position, the question behind them
        self.scored = self.method.order is Order.DENSITY_ASCENDING and len(self.placement.documents()) > 1
        standing = self.placement.documents()
        chosen = self.recipe.writers(self.reader.notes(self.tenant), self.placement, standing)
        self.writers = dict(zip(standing, chosen, strict=True))
        self._place(replace(self.placement, shared=True) if self.scored else self.placement)

    def _place(self, placement: Placement) -> None:
        """Take `placement` as the prompt's; what probes cost so far stays charged."""
        self.placement, ids = placement, placement.ids
        correction, positions, self.exact = self.method.correction, placement.positions, set()
        for i, chosen in self.writers.items():
            behind: tuple[int, ...] | None = chosen.writer.encoded_behind
            # lengths first: comparing the ids before every document would cost milliseconds in a long prompt
            if behind is None or not positions[i] == placement.starts[i] == len(behind):
                continue
            if ids[: len(behind)] == behind:
                self.exact.add(i)
        if correction is not None and correction.alters_exact:
            self.exact = set()
        spared = self.exact if self.method.reuses and not self.scored else set()
        spendable = [i for i in placement.documents() if i not in spared]
        tail = range(max(0, placement.tokens - self.logits), placement.tokens)
        inline = [placement.span(i) for i, run in enumerate(placement.runs) if run.document is None]
        known = self.scene if hasattr(self, "scene") else None
        self.scene = Scene(
            self.reader.model, placement, spendable, _merged([*inline[self.opening :], tail]), helper=self.reader.helper
        )
        if known is not None:
            self.scene.counter, self.scene.besides = known.counter, known.besides

    def allowed(self, scene: Scene) -> int | None:
        """Token-layers that the budget gives this prompt.

        Raises:
            InputError: not even the probe fits.
        """
        if self.method.budget is None:
            return None
        tokens = scene.tokens
        if self.scored:  # the document that will stand first may be exact there, and then is none to spend on
            tokens -= max(len(span) for span in scene.spans)
        allowed = self.method.budget.allows(tokens, scene.layers)
        least = (2 if self.scored else 1) * self.method.selector.least(scene)
        if tokens and allowed < least:
            share = least / (tokens * scene.layers)
            rule = (
                f"{self.method.name}: its probe alone costs {least} token-layers on this prompt ({share:.1%}), and the "
                f"budget allows {allowed}; the least possible is {least}"
            )
            raise InputError("budget", rule, str(self.method.budget))
        return allowed

    def read(self, ledger: Ledger, room: int) -> torch.Tensor:
        """See `Reader.read`; the cache is `scene.cache` afterwards."""
        model, method, allowed = self.reader.model, self.method, self.allowed(self.scene)
        choice = chosen = None
        if method.selector.probe.is_blind and not self.scored:  # an order to be found needs the segments placed
            with ledger.stage("choose"):
                choice, chosen = self._choose(allowed)
        covered = set() if choice is None or chosen is None else self._covered(choice, chosen)
        self._fetch(covered, ledger, self.placement.tokens + room)
        if choice is None or chosen is None:
            with ledger.stage("probe"):
                choice, chosen = self._choose(allowed)
                if self.scored:
                    self._reorder(chosen)
                    allowed = self.allowed(self.scene)
                    choice, chosen = self._choose(allowed)
        scene, computed = self.scene, torch.cat((chosen, self.scene.inline_slots))
        before, probed = scene.charged, scene.counter.rows
        out, inline_rows = self._repair(choice, chosen, room, ledger)
        repaired = scene.charged - before - inline_rows
        charged = scene.charged - len(scene.inline_slots) * scene.layers
        ledger.forward_tokens["probe"] += probed
        ledger.forward_tokens["read"] += scene.counter.rows - probed
        ledger.token_layers += scene.counter.token_layers
        if method.reuses:
            ledger.spending = Spending(scene.tokens, scene.layers, allowed, len(chosen), charged - repaired, repaired)
        Outcome(method, self.placement, self.exact, self.held, computed, choice.drop_rest).enter(ledger)
        compiled = 2.0 * model.layer_weights * ledger.forward_tokens["compile"]
        ledger.flops += counted_flops(model, scene.counter, scene.besides) + compiled
        ledger.flops_full += full_flops(model, self.placement.tokens)
        if method.reuses and covered and covered == set(self.placement.documents()):
            ledger.fall_back("nothing_reused", "every document of this prompt was computed; there was nothing to reuse")
        return out

    def release(self) -> None:
        """Give the cache back after a failure."""
        if self.scene.cache is not None:
            self.reader.model.pool.release(self.scene.cache)
            self.scene.cache = None

    def _choose(self, allowed: int | None) -> tuple[Choice, torch.Tensor]:
        """The selector's ranking and the head of it that is left after the probe is paid."""
        scene, method = self.scene, self.method
        choice = method.selector.choose(scene)
        left = None
        if allowed is not None:
            # inline rows that the probe has taken through the first layers already need not pass them again
            saved = (
                0
                if choice.entering is None
                else choice.first * int(torch.isin(scene.inline_slots, choice.entering[0]).sum())
            )
            left = max(0, allowed - scene.charged + saved)
        return choice, cut(choice, method.post, scene, left)

    def _covered(self, choice: Choice, chosen: torch.Tensor) -> set[int]:
        """Documents that are computed whole, in all layers, so that nothing of them need be fetched."""
        if choice.first > 0 or choice.last is not None or choice.decline or choice.drop_rest:
            return set()
        ran = torch.zeros(self.placement.tokens, dtype=torch.bool)
        ran[chosen] = True
        spans = {i: self.placement.span(i) for i in self.scene.spendable}
        return {i for i, span in spans.items() if bool(ran[span.start : span.stop].all())}

    def _fetch(self, covered: set[int], ledger: Ledger, capacity: int) -> None:
        """Get the segments of all documents but the `covered` ones and place them."""
        reader, placement = self.reader, self.placement
        wanted = [i for i in placement.documents() if i not in covered] if self.method.reuses else []
        standing = wanted if not self.opening else [0, *wanted]
        segments = [placement.runs[i].ids for i in standing]
        writers = [self.writers[i].writer if i in self.writers else OPENING for i in standing]
        keys = [reader.key(s, self.tenant, w) for s, w in zip(segments, writers, strict=True)]
        noted = reader.noting(self.recipe, self.tenant)
        with ledger.stage("lookup"):
            fetching = reader.store.fetch(
                list(zip(keys, segments, strict=True)),
                reader.compiler(segments, ledger, writers, lambda w, segment: w is OPENING or noted(w, segment)),
                layout=[reader.layout(w.side) for w in writers],
            )
            with fetching as held:
                self.held = dict(zip(standing, held, strict=True))
                placed = {i: h.segment for i, h in self.held.items() if h.segment is not None}
                with ledger.stage("place"):
                    self.scene.cache = assemble(reader.model, placement, placed, capacity)
                self.scene.segments = placed
        for i in wanted:
            document, reason = placement.runs[i].document, self.writers[i].reason
            if document is not None and reason:
                ledger.fall_back("not_prepared", f"{document.id}: {reason}")
        ledger.seconds["lookup"] -= ledger.seconds["place"] + ledger.seconds.get("compile", 0.0)

    def _reorder(self, chosen: torch.Tensor) -> None:
        """Documents with a larger share of chosen rows nearer to the question, placed anew from the same segments."""
        before, scene = self.placement, self.scene
        hit = torch.zeros(before.tokens, dtype=torch.bool)
        hit[chosen] = True
        density = {
            i: float(hit[s.start : s.stop].double().mean()) for i in before.documents() for s in [before.span(i)]
        }
        order = sorted(before.documents(), key=density.__getitem__)
        now = dict(zip(order, before.documents(), strict=True))
        held = {now.get(i, i): h for i, h in self.held.items()}
        self.writers = {now[i]: chosen for i, chosen in self.writers.items()}
        capacity = scene.cache.capacity if scene.cache is not None else before.tokens
        self.release()
        self.scored = False
        self._place(replace(before.reordered(order), shared=False))
        placed = {i: h.segment for i, h in held.items() if h.segment is not None}
        self.scene.cache = assemble(self.reader.model, self.placement, placed, capacity)
        self.held, self.scene.segments = held, placed

    def _repair(self, choice: Choice, chosen: torch.Tensor, room: int, ledger: Ledger) -> tuple[torch.Tensor, int]:
        """Run the pass; logits, and the inline token-layers in it."""
        scene, ids, correction = self.scene, self.placement.ids, self.method.correction
        cache, model = scene.cache, self.reader.model
        assert cache is not None  # `_fetch` has placed it
        if choice.drop_rest:
            kept = torch.ones(self.placement.tokens, dtype=torch.bool)
            kept[scene.slots] = False
            kept[torch.cat((chosen, scene.inline_slots))] = True
            slots = kept.nonzero()[:, 0]
            scene.cache = cache = compact(model, cache, slots, len(slots) + room)
            ids = tuple(ids[i] for i in slots.tolist())
            chosen = torch.searchsorted(slots, chosen)
            choice = replace(choice, ranking=chosen)
            inline = torch.searchsorted(slots, scene.inline_slots)
        else:
            inline = scene.inline_slots
        view = cache.view if correction is None else correction.view(scene, cache.view)
        watcher = None if correction is None else correction.watcher(scene, chosen)
        plan = row_plan(inline, scene.layers, choice, chosen, len(ids), view, watcher)
        with ledger.stage("read"):
            out = repair(model, cache, ids, plan, self.logits, scene.counter)
        resumed = 0 if choice.entering is None else int(torch.isin(inline, choice.entering[0]).sum()) * choice.first
        return out, len(inline) * scene.layers - resumed


def _merged(spans: list[range]) -> list[range]:
    """The same slots as ascending, disjoint ranges."""
    out: list[range] = []
    for span in sorted(spans, key=lambda r: r.start):
        if out and span.start <= out[-1].stop:
            out[-1] = range(out[-1].start, max(out[-1].stop, span.stop))
        elif len(span):
            out.append(span)
    return out
