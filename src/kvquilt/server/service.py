"""One engine behind a server: from a request's fields to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvquilt.answer import Answer, Stream
from kvquilt.engine import Engine
from kvquilt.identity import PUBLIC
from kvquilt.prompt import Document, Prompt, Run
from kvquilt.server.answering import Answering
from kvquilt.server.asked import ChatAsked, TextAsked, TokenizeAsked
from kvquilt.server.compiler import Compiler
from kvquilt.server.deadline import Deadline
from kvquilt.server.entry import Entry
from kvquilt.server.failures import LATER, RefusalError
from kvquilt.server.footprint import SLACK, of_prompt
from kvquilt.server.gauges import Gauges
from kvquilt.server.keyring import Keyring
from kvquilt.server.library import Library
from kvquilt.server.limits import Limits
from kvquilt.server.messages import make_prompt, named_in, parts_in
from kvquilt.server.metrics import Metrics
from kvquilt.server.record import Record
from kvquilt.server.reuse_counts import ReuseCounts
from kvquilt.server.scheduler import Scheduler, Ticket
from kvquilt.server.shares import Shares
from kvquilt.server.texts import Texts, Uploaded


@dataclass(eq=False, slots=True)
class Service:
    """What every route works with.

    Attributes:
        name: what clients call the model.
        folder: where uploaded texts are kept.
        keyring: whose keys are taken; None for one nameless tenant.
        shares: what tenants may keep of the store; None for all that is there.
    """

    engine: Engine
    name: str
    folder: Path
    limits: Limits = field(default_factory=Limits)
    keyring: Keyring | None = None
    shares: Shares | None = None
    scheduler: Scheduler = field(init=False)
    library: Library = field(init=False)
    compiler: Compiler = field(init=False)
    metrics: Metrics = field(init=False)
    running: bool = field(init=False, default=False)
    _tallies: dict[str | None, ReuseCounts] = field(default_factory=dict, repr=False)
    _answers: set[Answering] = field(default_factory=set, repr=False)
    _reading: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.library = Library(Texts(self.folder), self.limits)
        if self.shares is not None:
            self.engine.store.quote(self.shares)
        self.metrics = Metrics(self.name)
        gate = self.engine.settings.method == "auto"
        self.compiler = Compiler(self.engine, self.library, gate, self.metrics.compiled, self.scheduler)
        self.engine.model.pool.slack = (1, SLACK)  # a small prompt must not hold what a large one was admitted for
        gauges = Gauges(self.name, self.engine, self.scheduler, self.library, lambda: self.tenants)
        self.metrics.registry.register(gauges)
        self._reading = ThreadPoolExecutor(1, "kvquilt-prompt")

    @property
    def tenants(self) -> tuple[str | None, ...]:
        return (None,) if self.keyring is None else self.keyring.file.tenants

    def start(self) -> None:
        """Begin to compile what was uploaded earlier and is not stored."""
        self.compiler.start([*dict.fromkeys((*self.tenants, PUBLIC))])
        self.running = True

    def stopping(self) -> None:
        """The server takes no more; answers in work may end, and compiling ends behind the segment in work."""
        self.running = False
        self.compiler.tell()

    def stop(self) -> None:
        """End what runs in the background; what is compiled is stored."""
        self.stopping()
        end = time.monotonic() + self.limits.grace
        self.compiler.stop(self.limits.grace)
        for answering in list(self._answers):  # those that the grace was too short for
            answering.stop()
            answering.thread.join(max(0.0, end - time.monotonic()))
        self._reading.shutdown(wait=False, cancel_futures=True)

    def answered(self, record: Record, answer: Answer) -> None:
        """Note a finished answer where it is counted and logged."""
        record.answered(answer)
        self.metrics.answered(answer)
        self.tally(record.tenant).add(answer.ledger)

    def tally(self, tenant: str | None) -> ReuseCounts:
        """What this tenant's answers reused since the server began."""
        return self._tallies.setdefault(tenant, ReuseCounts())

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            rule = f"the model {name!r} does not exist; this server has {self.name!r}"
            raise RefusalError(404, "model_not_found", rule, "model")

    async def begin(self, asked: ChatAsked | TextAsked, tenant: str | None) -> Answering:
        """The answer on its way: its place was waited for, and its prompt is being read.

        Raises:
            RefusalError: it does not fit, too many wait, or its deadline passed meanwhile.
            KvquiltError: what was asked cannot be answered.
        """
        self.check_model(asked.model)
        if sum(1 for _ in parts_in(asked)) > self.limits.documents:
            raise RefusalError(400, "too_many_documents", f"more than {self.limits.documents} documents in a prompt")
        deadline = Deadline.of(asked.kvquilt.deadline, self.limits.deadline)
        ticket = self.scheduler.enter(tenant, len(self.tenants))
        try:
            async with asyncio.timeout_at(deadline.at):
                return await self._begin(asked, tenant, ticket, deadline)
        except TimeoutError:
            ticket.leave()
            rule = "the server was too busy to begin within the request's deadline"
            raise deadline.missed(rule, retry_after=LATER) from None
        except BaseException:
            ticket.leave()
            raise

    def keep(self, tenant: str | None, several: Sequence[Uploaded]) -> list[Entry]:
        """Take uploaded documents; what was compiled of another text under one of their ids goes.

        Raises:
            RefusalError, StoreUnavailableError: see `Library.put`.
        """
        before = [self.library.texts.read(tenant, each.id) for each in several]
        try:
            if self.shares is None:
                return self.library.put(tenant, several)
            sizes = [self.compiler.size(each.of(tenant)) for each in several]
            return self.library.put(tenant, several, sizes, self.shares.of(tenant))
        finally:  # where some could not be kept, others were replaced
            for old in before:
                if old is not None and not self.library.stands(tenant, old.digest):
                    self.compiler.discard(old.of(tenant), tenant)

    def forget(self, tenant: str | None, name: str) -> None:
        """Delete an uploaded document and what was compiled of it.

        Raises:
            RefusalError: there is none of that id.
        """
        gone = self.library.remove(tenant, name)
        if gone is not None and not self.library.stands(tenant, gone.digest):
            self.compiler.discard(gone.of(tenant), tenant)

    async def prompt(
        self, asked: ChatAsked | TextAsked | TokenizeAsked, tenant: str | None
    ) -> tuple[Prompt, tuple[Run, ...]]:
        """The prompt and its runs; made beside the loop, one at a time."""
        tokenizer = self.engine.model.tokenizer

        def make() -> tuple[Prompt, tuple[Run, ...]]:
            made = make_prompt(asked, tokenizer, lambda name: self.library.document(tenant, name))
            # nothing of a text is remembered, nor found, but for whose it is
            owned = [
                replace(p, tenant=tenant) if isinstance(p, Document) and p.tenant is None else p for p in made.parts
            ]
            prompt = Prompt(owned)
            return prompt, prompt.runs(tokenizer)

        return await asyncio.get_running_loop().run_in_executor(self._reading, make)

    async def _begin(
        self, asked: ChatAsked | TextAsked, tenant: str | None, ticket: Ticket, deadline: Deadline
    ) -> Answering:
        options = asked.options
        if named := named_in(asked):
            await self.library.ready(tenant, named, asked.kvquilt.wait)
        new = self.engine.sampling(options["max_new_tokens"]).max_new_tokens
        prompt, runs = await self.prompt(asked, tenant)
        takes = of_prompt(self.engine.reader, runs, new, self._methods(asked, tenant))
        began = time.perf_counter()
        await ticket.admitted(takes.stays, takes.reading)
        self.metrics.admitted(time.perf_counter() - began)

        def open(begun: Callable[[], None]) -> Stream:
            return self.engine.stream(prompt, **options, tenant=tenant, begun=begun)

        return Answering(open, ticket, deadline, self._answers, self.metrics.paced)

    def _methods(self, asked: ChatAsked | TextAsked, tenant: str | None) -> list[str]:
        """Those of which one will run."""
        named = asked.kvquilt.method or self.engine.settings.method
        if named != "auto":
            return [named]
        tuned = (self.engine.tuned(each) for each in (tenant, PUBLIC))
        return [*self.engine.reader.auto_order, *(each.chosen for each in tuned if each is not None and each.chosen)]
