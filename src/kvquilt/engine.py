"""The engine: the one place that walks the whole way from documents and a question to an answer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from kvquilt.answer import Answer, Live, Stream
from kvquilt.compiling import CompileReport, compile_documents
from kvquilt.config import Settings
from kvquilt.context import check_prompt_fits
from kvquilt.decode import Sampling
from kvquilt.document import check_owners
from kvquilt.errors import ContextLengthError, InputError
from kvquilt.gate import examine
from kvquilt.gate_report import DoctorReport
from kvquilt.identity import PUBLIC, namespace
from kvquilt.ledger import Ledger
from kvquilt.measured import Measured
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.steps import Steps
from kvquilt.opening import open_parts
from kvquilt.placement import place_runs
from kvquilt.policy import needs_verdict, written_method
from kvquilt.prompt import Document, Prompt, check_documents, continuation
from kvquilt.reading import Reader
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.retrieval import ranked_documents
from kvquilt.store import Store
from kvquilt.template import PromptTemplate, check_question, user_text
from kvquilt.tuning import tune
from kvquilt.tuning_report import TuneReport
from kvquilt.tuning_samples import Question
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.loaded import Given, Usable, load_all, load_one, method_of, paired

log = logging.getLogger(__name__)
SYSTEM = "Answer the question with the help of the documents. Be brief."


class Engine:
    """A model, a store and what joins them. Thread-safe; use as a context manager, or call `close`.

    Args:
        shared_prefix: ``True`` encodes documents behind the opening of the engine's own prompts, a text behind that
            text, ``False`` alone. Part of every segment key.
        system: system message of `ask`'s prompts.
        conversations: live caches kept for follow-ups; the oldest is released first.
        helper: a second, small model for methods that ask one; may be `model` itself.
        writers: trained writers by name; see `use`.
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
        helper: LanguageModel | None = None,
        writers: Mapping[str, Usable] = MappingProxyType({}),
    ) -> None:
        self.model, self.store = model, store
        self.steps = Steps(model)
        self.settings = settings or Settings.resolve()[0]
        if conversations < 0:
            raise InputError("conversations", "must be at least 0", conversations)
        self._conversations = conversations
        self._template = PromptTemplate(model.tokenizer, system)
        preamble = self._template.opening
        if isinstance(shared_prefix, str):
            prefix = Prompt([shared_prefix]).ids(model.tokenizer)
        else:
            prefix = preamble if shared_prefix else ()
        self.writer = Isolated(prefix)
        self.reader = Reader(model, store, self.writer, preamble, helper, load_all(paired(writers), model))
        self._live: deque[Live] = deque()
        self._lock = threading.Lock()
        self._measured = Measured(self)

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
        shared_prefix: bool | str = True,
        system: str = SYSTEM,
        conversations: int = 1,
        helper: str | None = None,
        writer: Given | Sequence[Given] | Mapping[str, Given] = (),
    ) -> Engine:
        """Load a model and open the store.

        Args:
            model: see `load_model`; by default the settings' model.
            store_dir: by default the settings' (``KVQUILT_STORE_DIR``).
            shared_prefix, system, conversations: see `Engine`.
            helper: the helper model, found like `model`; by default the settings' ``helper_model``, if any.
            writer: folders of trained writers: one, several, ``NAME=PATH``, or by name. See `use`.

        Raises:
            ModelNotFoundError, UnsupportedModelError, StoreUnavailableError.
            WriterError, WriterMismatchError: a writer's folder is damaged, or its writer belongs to another model.
        """
        settings = settings or Settings.resolve()[0]
        opened = open_parts(settings, model, helper, writer, dtype, device, threads, store_dir)
        try:
            return cls(
                opened.model, opened.store, settings,
                shared_prefix=shared_prefix, system=system, conversations=conversations, helper=opened.helper,
                writers=opened.writers,
            )  # fmt: skip
        except BaseException:
            opened.store.close()
            raise

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

    def use(self, writer: Given, name: str = "") -> str:
        """Have a trained writer at hand; returns the method that asks for it.

        One of the same name is replaced: its segments stay in the store and are no longer found, since keys hold the
        writer's digest, and its verdict no longer counts. Prompts that are being read end with the writer they began
        with.

        Args:
            writer: a folder, or the writer itself.
            name: by default its kind, whose method then uses it. With another name it stands beside the others:
                ``writer=NAME`` in any method.
        """
        name, made = load_one(writer, self.model, name)
        with self._lock:
            self.reader = replace(self.reader, trained={**self.reader.trained, name: made})
        return method_of(name, made)

    @property
    def template(self) -> PromptTemplate:
        """What its prompts have around documents and question."""
        return self._template

    def prompt(self, question: str, documents: Sequence[Document]) -> Prompt:
        """The prompt of `ask`: system message, documents, question, in the model's chat template if it has one."""
        return self._template.filled(question, documents)

    def compile(
        self,
        documents: Sequence[Document],
        tenant: str | None = None,
        gate: bool = True,
        progress: Callable[[int, int], None] | None = None,
        method: str = "",
    ) -> CompileReport:
        """Compile what is not stored yet, then measure on samples whether reuse is safe.

        Every finished segment is stored at once, so an interrupted call continues where it stopped. Many short
        documents run in one padded batch.

        Args:
            gate: measure for about ``settings.gate_seconds``; without it `auto` may have no verdict and prefill fully.
                Where nothing was compiled and a verdict is stored, that one is returned.
            progress: called with documents done and documents in all.
            method: compile as this method wants its documents encoded; by default as the tuned one does, if there is
                one, else as the first trained writer does, if there is one, else as most do.

        Raises:
            InputError: an empty document, one id with two texts, no documents.
            ContextLengthError: a document longer than the model's context.
        """
        namespace(tenant)  # refuses one that cannot be a name, before anything is computed
        documents = check_documents(documents)
        check_owners(documents, tenant)
        reader, recipe = self.reader, find_method(method).writer if method else self.compiled_by(tenant)
        report = compile_documents(reader, documents, tenant, progress, recipe)
        if not gate:
            return report
        verdict = self.verdict(tenant)
        if report.compiled or verdict is None or any(verdict.verdict(name) is None for name in reader.auto_order):
            verdict = self.doctor(documents, tenant, seconds=self.settings.gate_seconds)
        return replace(report, gate=verdict)

    def compiled_by(self, tenant: str | None = None) -> str:
        """The recipe of `compile` where no method is named; "" for the engine's own writer."""
        tuned = self._measured.tuned_method(tenant)
        return find_method(tuned).writer if tuned else next(iter(self.reader.trained), "")

    def ask(
        self,
        question: str | Prompt,
        documents: Sequence[Document] | None = None,
        *,
        method: str | None = None,
        budget: str | float | int | None = None,
        policy: str | None = None,
        tenant: str | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Answer a question over documents.

        Args:
            question: a text, or a whole `Prompt` (then without `documents`).
            documents: in the order in which they stand.
            method: ``auto`` (what the gate allows), or a name of `kvquilt.repair.presets` with its options, such as
                ``full``, ``none``, ``retrieved-document``, ``epic:k=16``.
            budget: what the method may spend beyond pure reuse: ``"5%"`` of what reuse saves (or the share as a
                float), or a whole number of token-layers. By default the one the method is written with, else the
                settings' (which `auto` and full prefill do not take), else the method's own.
            policy: ``auto`` obeys the gate: a method without a passing verdict becomes full prefill, and the ledger
                says so. ``always`` runs the named method regardless; it is the default when a method is named.
            tenant: whose segments; tenants never share.
            max_new_tokens, temperature, top_p, top_k, seed, stop: see `kvquilt.decode.Sampling`.

        Raises:
            InputError: empty question, no or bad documents, unknown method, bad sampling value, a bad budget or one
                smaller than what the method needs in order to choose.
            ContextLengthError: prompt and answer do not fit; says by how many tokens and what to drop.
            NumericsError: the model produced NaN.
        """
        return self.stream(
            question, documents, method=method, budget=budget, policy=policy, tenant=tenant,
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
        ).result()  # fmt: skip

    def stream(
        self,
        question: str | Prompt,
        documents: Sequence[Document] | None = None,
        *,
        method: str | None = None,
        budget: str | float | int | None = None,
        policy: str | None = None,
        tenant: str | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        begun: Callable[[], object] = lambda: None,
    ) -> Stream:
        """`ask`, streamed: a `Stream` of text pieces. Input errors come at once, computing starts with iteration.

        Args:
            begun: called by the iterating thread once the prompt is read and decoding begins.
        """
        chosen = self.sampling(max_new_tokens, stop, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        asked = written_method(self.settings.method if method is None else method, budget, default=self.settings.budget)
        gated = needs_verdict(asked, self.settings.policy if policy is None else policy)
        namespace(tenant)  # refuses one that cannot be a name, before anything is computed
        ledger = Ledger(asked=asked, model=self.model.name, threads=self.model.threads)
        reader = self.reader  # once: a writer may be replaced at any time
        with ledger.stage("prompt"):
            prompt = self._template.asked(question, documents)
            runs = prompt.runs(self.model.tokenizer)
            if not runs:
                raise InputError("question", "the prompt has no tokens")
            check_prompt_fits(self.model.capability, runs, chosen.max_new_tokens)
            # documents whose text has no tokens have no run
            held = [r.document for r in runs if r.document is not None]
            check_owners(held, tenant, PUBLIC)
            preset = self._measured.allowed(asked, tenant, ledger, reader, held) if gated else find_method(asked)
            ranking = ranked_documents(user_text(prompt), held) if preset.needs_ranking else ()
            placement = place_runs(runs, preset.order, ranking, preset.moved)
            try:
                reader.check(placement, preset, tenant, chosen.max_new_tokens)
            except InputError as error:
                if asked != "auto":
                    raise
                ledger.fall_back("unaffordable", str(error))
                preset, placement = METHODS["full"], place_runs(runs)
        ledger.method = preset.name

        def read() -> Any:
            return reader.read(placement, preset, tenant, ledger, chosen.max_new_tokens)

        return Stream(self, read, chosen, ledger, tenant, begun)

    def continue_from(self, live: Live, earlier: Ledger, tokens: int, question: str, sampling: Sampling) -> Stream:
        """The next turn of a conversation, behind its live cache; reached through `Answer.follow_up`."""
        ledger = Ledger(
            method=earlier.method, asked=earlier.asked, model=earlier.model, threads=earlier.threads,
            gate=earlier.gate, fallbacks=list(earlier.fallbacks), writer=earlier.writer, soft_rows=earlier.soft_rows,
        )  # fmt: skip
        with ledger.stage("prompt"):
            check_question(question)
            following = continuation(self.model.tokenizer, question)
            new = [*live.pending, *following.ids(self.model.tokenizer)]
        cache = live.cache  # once: another follow-up may take it meanwhile
        cached = cache.next_position if cache is not None else tokens  # dropped tokens keep their positions
        over = cached + len(new) + sampling.max_new_tokens - self.model.capability.max_length
        if over > 0:
            raise ContextLengthError("question", f"the conversation is {over} tokens too long; start a new one")

        def read() -> Any:
            return self.reader.extend(live.take(), new, earlier.method, ledger, sampling.max_new_tokens)

        return Stream(self, read, sampling, ledger, live.tenant)

    def doctor(
        self,
        documents: Sequence[Document] | None = None,
        tenant: str | None = None,
        *,
        seconds: float = 600.0,
        prompts: int = 12,
        methods: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> DoctorReport:
        """Run the gate on `documents` (built-in texts if none are given) and store its verdict; see `kvquilt.gate`.

        Args:
            methods: which to measure, as they are written (``epic:k=16``); by default what `auto` tries. Earlier
                verdicts on others stay.

        Raises:
            InputError: an unknown method, one that does not reuse, or one whose budget cannot pay for its choosing.
        """
        namespace(tenant)  # refuses one that cannot be a name, before anything is computed
        self._measured.keep(tenant, examine(self, documents, tenant, seconds, prompts, progress, methods))
        report = self.verdict(tenant)
        assert report is not None  # just kept
        return report

    def verdict(self, tenant: str | None = None) -> DoctorReport | None:
        """The stored gate report for this model, writer and tenant, if there is one."""
        return self._measured.report(tenant)

    def tune(
        self,
        documents: Sequence[Document],
        questions: Sequence[Question] = (),
        *,
        target: float = 0.98,
        methods: Sequence[str] | None = None,
        prompts: int = 24,
        seconds: float = 1800.0,
        tenant: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> TuneReport:
        """Find the cheapest method that keeps the answers on `documents`, for ``auto``; see `kvquilt.tuning.tune`."""
        namespace(tenant)  # refuses one that cannot be a name, before anything is computed
        report = tune(
            self, check_documents(documents), questions, target=target, methods=methods, prompts=prompts,
            seconds=seconds, tenant=tenant, progress=progress,
        )  # fmt: skip
        self._measured.keep(tenant, report)
        return report

    def tuned(self, tenant: str | None = None) -> TuneReport | None:
        """The stored report of the last `tune` for this model, writer and tenant, if there is one."""
        return self._measured.tuning(tenant)

    def forget_tuning(self, tenant: str | None = None) -> bool:
        """Remove that report, so that `auto` goes by the gate again; whether there was one.

        Engines that have read it go on by it until they are closed.

        Raises:
            StoreUnavailableError: the store's directory cannot be written; this engine has forgotten it all the same.
        """
        return self._measured.forget_tuning(tenant)

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

    def sampling(self, max_new_tokens: int | None = None, stop: Sequence[str] = (), **options: Any) -> Sampling:
        """`Sampling` with the settings' answer length where none is given."""
        length = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        return Sampling(stop=tuple(stop) if isinstance(stop, list) else stop, max_new_tokens=length, **options)  # type: ignore[arg-type]
