"""One prompt from its placement to its first logits: fetch, assemble, choose, repair, account for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kvquilt.accounting import Outcome, counted_flops, full_flops
from kvquilt.errors import InputError
from kvquilt.identity import PUBLIC
from kvquilt.ledger import Ledger, Spending
from kvquilt.model.counter import RowCounter
from kvquilt.model.parts import PLAIN, SOFT, Parts
from kvquilt.placement import Order, Placement
from kvquilt.repair.operator import assemble, compact, repair
from kvquilt.repair.plan import cut, row_plan
from kvquilt.repair.presets import Method
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice
from kvquilt.store import Held
from kvquilt.writers.constant import Constant
from kvquilt.writers.encoder import depth, looking, unplaced
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.link_tokens import LinkTokens
from kvquilt.writers.recipe import Chosen, Recipe
from kvquilt.writers.trained import Trained

if TYPE_CHECKING:
    from kvquilt.reading import Reader

OPENING = Isolated()  # compiles the prompt's opening: behind nothing, it is what full prefill computes


@dataclass(eq=False, slots=True)
class Request:
    """One prompt while it is read; `scene.cache` is its cache from the moment there is one.

    Attributes:
        logits: how many of the last rows are run whatever they hold, since they predict what follows.
        exact: document runs behind the very tokens they were encoded behind; nothing is ever spent on them.
        opening: whether the prompt begins with the reader's preamble, which is compiled, too.
        scored: a first round of choosing is still to decide in which order the documents stand.
        parts: what every forward over the cache has beside the model.
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
    parts: Parts = field(init=False, default=PLAIN)
    held: Mapping[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe = self.reader.recipe(self.method.writer)
        first = self.placement.runs[0]
        self.opening = self.method.reuses and first.document is None and first.ids == self.reader.preamble
        # what is scored first is scored in local frames: every document at one position, the question behind them
        self.scored = self.method.order is Order.DENSITY_ASCENDING and len(self.placement.documents()) > 1
        standing = self.placement.documents()
        chosen = self.recipe.writers(self.reader.notes(self.tenant), self.placement, standing)
        links = self.reader.trained.get(self.method.writer) if self.method.reuses else None
        if isinstance(links, LinkTokens):
            links.check(self.reader.model)
            self.placement, self.parts = links.linked(self.placement, self.method.order), links.parts()
        self.writers = dict(zip(self.placement.documents(), chosen, strict=True))
        if self.method.reuses:
            self.placement = unplaced(self.placement, {i: c.writer for i, c in self.writers.items()}, self.method)
        around = {i: each.writer.around for i, each in self.writers.items() if any(each.writer.around)}
        if around and self.method.reuses:
            self.placement = self.placement.wrapped(around)
            trained = next((each.writer for each in chosen if isinstance(each.writer, Trained)), None)
            if trained is not None:  # where a wrapped document ends the prompt, its last soft rows are computed
                self.parts = Parts(soft=trained.parts.soft)
        self._place(replace(self.placement, shared=True) if self.scored else self.placement, RowCounter(), 0)

    def _place(self, placement: Placement, counter: RowCounter, besides: int) -> None:
        """Take `placement` as the prompt's; `counter` and `besides` are what probes cost so far."""
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
        spendable = [i for i in placement.documents() if i not in spared and placement.runs[i].placed]
        tail = range(max(0, placement.tokens - self.logits), placement.tokens)
        inline = [placement.span(i) for i, run in enumerate(placement.runs) if run.document is None]
        self.scene = Scene(
            model=self.reader.model,
            placement=placement,
            spendable=spendable,
            inline=_merged([*inline[self.opening :], tail]),
            helper=self.reader.helper,
            counter=counter,
            besides=besides,
        )

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
                f"{', more than reuse saves here: take another method, or full' if share > 1 else ''}"
            )
            raise InputError("budget", rule, str(self.method.budget))
        return allowed

    def read(self, ledger: Ledger, room: int) -> torch.Tensor:
        """See `Reader.read`; the cache is `scene.placed` afterwards."""
        model, method, allowed = self.reader.model, self.method, self.allowed(self.scene)
        choice = chosen = None
        if method.selector.probe.is_blind and not self.scored:  # an order to be found needs the segments placed
            with ledger.stage("choose"):
                choice, chosen = self._choose(allowed)
        covered = set() if choice is None or chosen is None else self._covered(choice, chosen)
        ledger.writer = self.reader.called(method.writer) if self.writers and method.reuses else ""
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
            ledger.spending = Spending(
                scene.tokens,
                scene.layers,
                allowed,
                len(chosen),
                charged - repaired,
                repaired,
                choice.first,
                choice.last,
            )
        Outcome(method, self.placement, self.exact, self.held, computed, choice.drop_rest).enter(ledger)
        compiled = 2.0 * model.layer_weights * ledger.forward_tokens["compile"]
        ledger.flops += counted_flops(model, scene.counter, scene.besides) + compiled
        # documents that take no slots here would take them there, and soft tokens would not be
        tokens = sum(i < SOFT for run in self.placement.runs for i in run.ids)
        ledger.flops_full += full_flops(model, tokens)
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
            left = max(0, allowed - scene.charged + choice.first * choice.resuming(scene.inline_slots))
        return choice, cut(choice, method.post, scene, left)

    def _covered(self, choice: Choice, chosen: torch.Tensor) -> set[int]:
        """Documents that are computed whole, in all layers, so that nothing of them need be fetched."""
        if choice.first > 0 or choice.last is not None or choice.decline or choice.drop_rest:
            return set()
        ran = torch.zeros(self.placement.tokens, dtype=torch.bool)
        ran[chosen] = True
        # soft tokens are never computed, so a wrapped document is fetched in any case
        spans = {i: self.placement.extent(i) for i in self.scene.spendable}
        return {i for i, span in spans.items() if bool(ran[span.start : span.stop].all())}

    def _fetch(self, covered: set[int], ledger: Ledger, capacity: int) -> None:
        """Get the segments of all documents but the `covered` ones and place them."""
        reader, placement = self.reader, self.placement
        wanted = [i for i in placement.documents() if i not in covered] if self.method.reuses else []
        standing = wanted if not self.opening else [0, *wanted]
        segments = [placement.runs[i].ids for i in standing]
        writers = [self.writers[i].writer if i in self.writers else OPENING for i in standing]
        owners = [self._owner(i) for i in standing]
        keys = [reader.key(s, o, w) for s, o, w in zip(segments, owners, writers, strict=True)]
        rows = [placement.runs[i].rows or placement.runs[i].ids for i in standing]
        noted = reader.noting(self.recipe, self.tenant)
        with ledger.stage("lookup"):
            fetching = reader.store.fetch(
                list(zip(keys, rows, strict=True)),
                reader.compiler(segments, ledger, writers, lambda w, segment: w is OPENING or noted(w, segment)),
                layout=[reader.layout(w.side, depth(w)) for w in writers],
            )
            with fetching as held:
                self.held = dict(zip(standing, held, strict=True))
                found = {i: h.segment for i, h in self.held.items() if h.segment is not None}
                placed = {i: segment for i, segment in found.items() if placement.runs[i].placed}
                with ledger.stage("place"):
                    self.scene.cache = assemble(reader.model, placement, placed, capacity)
                    beside = [(self.writers[i].writer, s) for i, s in found.items() if i not in placed]
                    self.scene.cache.parts = looking(reader.model, beside, self.parts)
                self.scene.segments = placed
        for i in wanted:
            document, reason = placement.runs[i].document, self.writers[i].reason
            if document is not None and reason:
                ledger.fall_back("not_prepared", f"{document.id}: {reason}")
        ledger.seconds["lookup"] -= ledger.seconds["place"] + ledger.seconds.get("compile", 0.0)

    def _owner(self, run: int) -> str | None:
        """Whose segment a run has: a public document's is everybody's, where it depends on nothing around it."""
        document = self.placement.runs[run].document
        apart = isinstance(self.recipe, Constant)  # others may encode it behind what this tenant alone knows
        return PUBLIC if apart and document is not None and document.tenant == PUBLIC else self.tenant

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
        capacity = scene.placed.capacity
        self.release()
        self.scored = False
        self._place(replace(before.reordered(order), shared=False), scene.counter, scene.besides)
        placed = {i: h.segment for i, h in held.items() if h.segment is not None}
        self.scene.cache = assemble(self.reader.model, self.placement, placed, capacity)
        self.scene.cache.parts = self.parts
        self.held, self.scene.segments = held, placed

    def _repair(self, choice: Choice, chosen: torch.Tensor, room: int, ledger: Ledger) -> tuple[torch.Tensor, int]:
        """Run the pass; logits, and the inline token-layers in it."""
        scene, ids, correction = self.scene, self.placement.ids, self.method.correction
        cache, model = scene.placed, self.reader.model
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
        return out, len(inline) * scene.layers - choice.first * choice.resuming(inline)


def _merged(spans: list[range]) -> list[range]:
    """The same slots as ascending, disjoint ranges."""
    out: list[range] = []
    for span in sorted(spans, key=lambda r: r.start):
        if out and span.start <= out[-1].stop:
            out[-1] = range(out[-1].start, max(out[-1].stop, span.stop))
        elif len(span):
            out.append(span)
    return out
