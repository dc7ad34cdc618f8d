"""The engine: the one place that walks the whole way from documents and a question to an answer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from kvquilt.answer import Answer, Live, Stream
from kvquilt.compiling import CompileReport, compile_documents
from kvquilt.config import Settings
from kvquilt.context import check_prompt_fits
from kvquilt.decode import Sampling
from kvquilt.errors import ContextLengthError, InputError, nearest
from kvquilt.gate import DoctorReport, examine, note_name
from kvquilt.identity import namespace
from kvquilt.ledger import Ledger
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.placement import Placement, place_runs
from kvquilt.policy import needs_verdict, resolve
from kvquilt.prompt import Document, Prompt, check_documents, continuation, segment_ids
from kvquilt.reading import Reader
from kvquilt.repair.presets import METHODS, Method
from kvquilt.retrieval import best_document
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated

SYSTEM = "Answer the question with the help of the documents. Be brief."


class Engine:
    """A model, a store and what joins them. Thread-safe; use as a context manager, or call `close`.

    Args:
        shared_prefix: ``True`` encodes documents behind the opening of the engine's own prompts, a text behind that
            text, ``False`` alone. Part of every segment key.
        system: system message of `ask`'s prompts.
        conversations: live caches kept for follow-ups; the oldest is released first.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: Store,
        settings: Settings | None = None,
        *,
        shared_prefix: bool | str = True,
        system: str = SYSTEM,
        conversations: int = 1,
    ) -> None:
        self.model, self.store = model, store
        self.settings = settings or Settings.resolve()[0]
        self._system, self._conversations = system, conversations
        preamble = self._preamble()
        if isinstance(shared_prefix, str):
            prefix = Prompt([shared_prefix]).ids(model.tokenizer)
        else:
            prefix = preamble if shared_prefix else ()
        self.writer = Isolated(prefix)
        self.reader = Reader(model, store, self.writer, preamble)
        self._live: deque[Live] = deque()
        self._lock = threading.Lock()
        self._reports: dict[str, DoctorReport | None] = {}

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        dtype: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        store_dir: str | Path | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> Engine:
        """Load a model and open the store.

        Args:
            model: see `load_model`; by default the settings' model.
            store_dir: by default the settings' (``KVQUILT_STORE_DIR``).
            options: of `Engine`.

        Raises:
            ModelNotFoundError, UnsupportedModelError, StoreUnavailableError.
        """
        settings = settings or Settings.resolve()[0]
        loaded = load_model(
            model or settings.model,
            dtype or settings.dtype,
            device or settings.device,
            threads or settings.threads,
            settings,
        )
        store = Store.open(store_dir or settings.store_dir, settings.memory_bytes, settings.disk_bytes)
        return cls(loaded, store, settings, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release live caches and the store."""
        with self._lock:
            while self._live:
                self._release(self._live.popleft())
        self.store.close()

    def prompt(self, question: str, documents: Sequence[Document]) -> Prompt:
        """The prompt of `ask`: system message, documents, question, in the model's chat template if it has one."""
        if not self.model.tokenizer.chat_template:
            return Prompt.plain(self._system, documents, question)
        content = [*documents, f"\nQuestion: {question}"]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": content},
        ]
        return Prompt.chat(messages, self.model.tokenizer)

    def compile(
        self,
        documents: Sequence[Document],
        tenant: str | None = None,
        gate: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> CompileReport:
        """Compile what is not stored yet, then measure on samples whether reuse is safe.

        Every finished segment is stored at once, so an interrupted call continues where it stopped. Many short
        documents run in one padded batch.

        Args:
            gate: measure for about ``settings.gate_seconds``; without it `auto` may have no verdict and prefill fully.
            progress: called with documents done and documents in all.

        Raises:
            InputError: an empty document, one id with two texts, no documents.
            ContextLengthError: a document longer than the model's context.
        """
        _check_tenant(tenant)
        documents = check_documents(documents)
        report = compile_documents(self.reader, documents, tenant, progress)
        if not gate:
            return report
        return replace(report, gate=self.doctor(documents, tenant, seconds=self.settings.gate_seconds))

    def ask(self, question: str | Prompt, documents: Sequence[Document] | None = None, **options: Any) -> Answer:
        """Answer a question over documents.

        Args:
            question: a text, or a whole `Prompt` (then without `documents`).
            documents: in the order in which they stand.
            method: ``auto`` (what the gate allows), ``full``, ``none``, ``retrieved-document``.
            policy: ``auto`` obeys the gate: a method without a passing verdict becomes full prefill, and the ledger
                says so. ``always`` runs the named method regardless; it is the default when a method is named.
            tenant: whose segments; tenants never share.
            max_new_tokens, temperature, top_p, top_k, seed, stop: see `kvquilt.decode.Sampling`.

        Raises:
            InputError: empty question, no or bad documents, unknown method, bad sampling value.
            ContextLengthError: prompt and answer do not fit; says by how many tokens and what to drop.
            NumericsError: the model produced NaN.
        """
        return self.stream(question, documents, **options).result()

    def stream(
        self,
        question: str | Prompt,
        documents: Sequence[Document] | None = None,
        *,
        method: str | None = None,
        policy: str | None = None,
        tenant: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """`ask`, streamed: a `Stream` of text pieces. Input errors come at once, computing starts with iteration."""
        chosen = _sampling(sampling, self.settings)
        asked = method or self.settings.method
        gated = needs_verdict(asked, policy)
        _check_tenant(tenant)
        ledger = Ledger(asked=asked, model=self.model.name, threads=self.model.threads)
        with ledger.stage("prompt"):
            prompt = self._prompt_of(question, documents)
            runs = prompt.runs(self.model.tokenizer)
            if not runs:
                raise InputError("question", "the prompt has no tokens")
            check_prompt_fits(self.model.capability, runs, chosen.max_new_tokens)
            preset, fallback = resolve(asked, self.verdict(tenant)) if gated else (METHODS[asked], None)
            if fallback is not None:
                ledger.fallbacks.append(fallback)
            # documents whose text has no tokens have no run
            held = [r.document for r in runs if r.document is not None]
            target = best_document(_user_text(prompt), held) if preset.selector.probe == "retriever" else None
            placement = place_runs(runs, preset.order, target)
            spot = None if target is None else placement.documents()[-1 if preset.order == "target_last" else target]
        return self.run(placement, preset, spot, tenant, chosen, ledger)

    def run(
        self,
        placement: Placement,
        method: Method,
        target: int | None,
        tenant: str | None,
        sampling: Sampling,
        ledger: Ledger,
    ) -> Stream:
        """Stream the answer to a placed prompt; `target` is the run index of the best-ranked document."""
        ledger.method = method.name
        return Stream(
            self,
            lambda: self.reader.read(placement, method, target, tenant, ledger, sampling.max_new_tokens),
            sampling,
            ledger,
            tenant,
        )

    def continue_from(self, live: Live, earlier: Ledger, tokens: int, question: str, **sampling: Any) -> Stream:
        """The next turn of a conversation, behind its live cache; reached through `Answer.follow_up`."""
        chosen = _sampling(sampling, self.settings)
        _check_question(question)
        following = continuation(self.model.tokenizer, question)
        new = [*live.pending, *following.ids(self.model.tokenizer)]
        cached = live.cache.filled if live.cache is not None else tokens
        over = cached + len(new) + chosen.max_new_tokens - self.model.capability.max_length
        if over > 0:
            raise ContextLengthError("question", f"the conversation is {over} tokens too long; start a new one")
        ledger = Ledger(
            method=earlier.method, asked=earlier.asked, model=earlier.model, threads=earlier.threads,
            documents=earlier.documents, fallbacks=list(earlier.fallbacks),
        )  # fmt: skip

        def read() -> Any:
            return self.reader.extend(live.take(), new, earlier.method, ledger, chosen.max_new_tokens)

        return Stream(self, read, chosen, ledger, live.tenant)

    def doctor(
        self,
        documents: Sequence[Document] | None = None,
        tenant: str | None = None,
        *,
        seconds: float = 600.0,
        prompts: int = 12,
        progress: Callable[[int, int], None] | None = None,
    ) -> DoctorReport:
        """Run the gate on `documents` (built-in texts if none are given) and store its verdict; see `kvquilt.gate`."""
        _check_tenant(tenant)
        chosen = check_documents(documents) if documents is not None else _builtin_documents()
        room = self.model.capability.max_length // 8
        # a sample prompt holds four documents, an answer and the template
        fitting = [d for d in chosen if len(segment_ids(d, self.model.tokenizer)) <= room] or [
            replace(chosen[0], text=chosen[0].text[:room])
        ]
        report = examine(self, fitting, tenant, seconds, prompts, progress)
        self._reports[namespace(tenant)] = report
        return report

    def verdict(self, tenant: str | None = None) -> DoctorReport | None:
        """The stored gate report for this model, writer and tenant, if there is one."""
        space = namespace(tenant)
        if self._reports.get(space) is None:
            note = self.store.read_note(space, note_name(self))
            self._reports[space] = None if note is None else DoctorReport.from_dict(note)
        return self._reports[space]

    def keep(self, live: Live) -> None:
        """Hold the cache of a finished answer for follow-ups; release the oldest beyond the limit."""
        with self._lock:
            # one that was continued holds nothing and must not take another conversation's place
            self._live = deque(each for each in self._live if each.cache is not None)
            self._live.append(live)
            while len(self._live) > self._conversations:
                self._release(self._live.popleft())

    def _release(self, live: Live) -> None:
        cache = live.drop()
        if cache is not None:
            self.model.pool.release(cache)

    def _preamble(self) -> tuple[int, ...]:
        """Ids that every prompt of `ask` begins with."""
        runs = self.prompt("?", [Document("x")]).runs(self.model.tokenizer)
        return runs[0].ids if runs[0].document is None else ()

    def _prompt_of(self, question: str | Prompt, documents: Sequence[Document] | None) -> Prompt:
        if isinstance(question, Prompt):
            if documents is not None:
                raise InputError("documents", "must not be given beside a Prompt, which holds its own")
            return question
        _check_question(question)
        if documents is None:
            raise InputError("documents", "at least one is needed")
        return self.prompt(question, check_documents(documents))


def _sampling(options: dict[str, Any], settings: Settings) -> Sampling:
    known = Sampling.__dataclass_fields__
    for name in options:
        if name not in known:
            raise InputError(name, f"unknown option{nearest(name, [*known, 'method', 'policy', 'tenant'])}")
    options.setdefault("max_new_tokens", settings.max_new_tokens)
    if isinstance(options.get("stop"), list):
        options["stop"] = tuple(options["stop"])
    return Sampling(**options)


def _check_question(question: object) -> None:
    if not isinstance(question, str) or not question.strip():
        raise InputError("question", "must be a non-empty text")


def _check_tenant(tenant: object) -> None:
    if tenant is not None and not isinstance(tenant, str):
        raise InputError("tenant", "must be a string or None", type(tenant).__name__)


def _user_text(prompt: Prompt) -> str:
    """What the user wrote beside the documents: what BM25 ranks them by."""
    return " ".join(p.text for p in prompt.parts if not isinstance(p, Document) and not p.control)


def _builtin_documents() -> tuple[Document, ...]:
    """Help texts of the standard library, for a gate without the user's own documents."""
    from pydoc_data.topics import topics

    names = ("assert", "break", "continue", "del", "global", "if", "import", "pass", "raise", "return", "while", "with")
    return tuple(Document(topics[n].strip()[:900], id=n) for n in names)
