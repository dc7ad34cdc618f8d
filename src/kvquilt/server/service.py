"""One engine behind a server: from a request's fields to its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvquilt.answer import Stream
from kvquilt.engine import Engine
from kvquilt.prompt import Document, Prompt
from kvquilt.server.answering import Answering
from kvquilt.server.failures import RefusalError
from kvquilt.server.fields import ChatAsked, TextAsked, TokenizeAsked
from kvquilt.server.limits import Limits
from kvquilt.server.messages import make_prompt, parts_in
from kvquilt.server.scheduler import Scheduler, Ticket


@dataclass(eq=False, slots=True)
class Service:
    """What every route works with. `name` is what clients call the model."""

    engine: Engine
    name: str
    limits: Limits = field(default_factory=Limits)
    scheduler: Scheduler = field(init=False)
    _reading: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self._reading = ThreadPoolExecutor(1, "kvquilt-prompt")

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
        limit = min(self.limits.deadline, asked.kvquilt.deadline or self.limits.deadline)
        deadline = asyncio.get_running_loop().time() + limit
        ticket = self.scheduler.enter(tenant)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._begin(asked, tenant, ticket, deadline)
        except TimeoutError:
            ticket.leave()
            rule = "the server was too busy to begin within the request's deadline"
            raise RefusalError(504, "deadline_exceeded", rule, retry_after=5) from None
        except BaseException:
            ticket.leave()
            raise

    async def prompt(self, asked: ChatAsked | TextAsked | TokenizeAsked, tenant: str | None) -> Prompt:
        """The prompt, whose ids are remembered; made beside the loop, one at a time."""
        tokenizer = self.engine.model.tokenizer

        def make() -> Prompt:
            prompt = make_prompt(asked, tokenizer, lambda name: self._find(name, tenant))
            prompt.ids(tokenizer)
            return prompt

        return await asyncio.get_running_loop().run_in_executor(self._reading, make)

    async def _begin(
        self, asked: ChatAsked | TextAsked, tenant: str | None, ticket: Ticket, deadline: float
    ) -> Answering:
        options = asked.options
        new = self.engine.sampling(options["max_new_tokens"]).max_new_tokens
        prompt = await self.prompt(asked, tenant)
        await ticket.admitted(self._bytes(len(prompt.ids(self.engine.model.tokenizer)) + new))

        def open(begun: Callable[[], None]) -> Stream:
            return self.engine.stream(prompt, **options, tenant=tenant, begun=begun)

        return Answering(open, ticket, deadline)

    def _find(self, name: str, tenant: str | None) -> Document:
        raise RefusalError(404, "document_not_found", f"no document of the id {name!r}", "document")

    def _bytes(self, tokens: int) -> int:
        """Of a cache, which has room for whole blocks of 64."""
        return -(-tokens // 64) * 64 * self.engine.reader.layout().bytes_per_token
