"""What was measured of the methods on an engine's model: gate reports and tunings, by tenant, read once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvquilt.document import Document
from kvquilt.errors import StoreUnavailableError
from kvquilt.gate import stored_report
from kvquilt.gate_report import DoctorReport
from kvquilt.identity import PUBLIC, namespace
from kvquilt.ledger import Ledger
from kvquilt.policy import resolve
from kvquilt.reading import Reader
from kvquilt.repair.presets import Method, find_method
from kvquilt.store import Failure
from kvquilt.tuning import note_name, stored_tuning
from kvquilt.tuning_report import TuneReport

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(eq=False, slots=True)
class Measured:
    """Reports of one engine, and what they allow."""

    engine: Engine = field(repr=False)
    _reports: dict[str, DoctorReport] = field(default_factory=dict, repr=False)
    _tunings: dict[tuple[str, str], TuneReport] = field(default_factory=dict, repr=False)

    def report(self, tenant: str | None, reader: Reader | None = None) -> DoctorReport | None:
        """The tenant's gate report, as far as it was measured with the reader's helper model and trained writers.

        Args:
            reader: whose it must be; by default the engine's.
        """
        space, reader = namespace(tenant), reader or self.engine.reader
        if space not in self._reports and (stored := stored_report(self.engine, tenant)) is not None:
            self._reports[space] = stored
        helper, known = reader.helper, self._reports.get(space)
        asked = "" if helper is None else helper.fingerprint.digest
        return None if known is None else known.asking(asked, reader.identities)

    def tuning(self, tenant: str | None) -> TuneReport | None:
        """The tenant's last tuning with just these trained writers."""
        space = namespace(tenant), note_name(self.engine)
        if space not in self._tunings and (stored := stored_tuning(self.engine, tenant)) is not None:
            self._tunings[space] = stored
        return self._tunings.get(space)

    def keep(self, tenant: str | None, measured: DoctorReport | TuneReport) -> None:
        """Take a new measurement, which the store may have been unable to keep."""
        if isinstance(measured, DoctorReport):
            self._reports[namespace(tenant)] = measured
        else:
            self._tunings[namespace(tenant), note_name(self.engine)] = measured

    def forget_tuning(self, tenant: str | None) -> bool:
        """Go by the gate again; see `Engine.forget_tuning`."""
        space = namespace(tenant), note_name(self.engine)
        known = self._tunings.pop(space, None)
        outcome = self.engine.store.forget_note(*space)
        if isinstance(outcome, Failure):
            raise StoreUnavailableError(f"what tune chose could not be removed from the store ({outcome.reason})")
        return outcome or known is not None

    def tuned_method(self, tenant: str | None) -> str | None:
        """What `auto` runs on account of a tuning that holds."""
        tuning = self.tuning(tenant)
        return tuning.chosen if tuning is not None and tuning.accepted else None

    def allowed(
        self, asked: str, tenant: str | None, ledger: Ledger, reader: Reader, documents: Iterable[Document] = ()
    ) -> Method:
        """What the measurements make of the method asked for; they or a refusal are entered into the ledger.

        Args:
            documents: of the prompt. What was measured on the tenant's own says nothing of public ones: a prompt of
                these alone goes by what was measured on them, and one of both by what holds on both.
        """
        public = {document.tenant == PUBLIC for document in documents}
        if public == {True}:
            tenant = PUBLIC
        settings, report = self.engine.settings, self.report(tenant, reader)
        tuning, tuned = self.tuning(tenant), self.tuned_method(tenant) if asked == "auto" else None
        if public == {True, False} and tenant != PUBLIC:
            theirs, tuning = self.report(PUBLIC, reader), None
            report = None if report is None or theirs is None else report.both(theirs)
        if tuning is not None and tuned is not None and (report is None or report.healthy):
            ledger.gate = f"{tuned} was tuned for {tuning.target:g}: {tuning.summary}"
            return find_method(tuned)
        limits = settings.gate_max_kl, settings.gate_min_top1
        preset, fallback = resolve(asked, report, *limits, reader.auto_order)
        if fallback is not None:
            ledger.fall_back(fallback.reason, fallback.detail)
        if preset.reuses and report is not None and (verdict := report.verdict(preset.name)) is not None:
            ledger.gate = f"{preset.name} passed: {verdict.summary}"
        return preset
