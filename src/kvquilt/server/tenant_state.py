"""``/v1/kvquilt/state``: what stands and what was reused, of the one who asks; numbers and no names."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from fastapi import APIRouter, Request

from kvquilt.engine import Engine
from kvquilt.identity import namespace
from kvquilt.repair.presets import METHODS
from kvquilt.repair.selector import Probe
from kvquilt.server.entry import State
from kvquilt.server.record import record_of
from kvquilt.server.service import Service
from kvquilt.store import Store
from kvquilt.writers.recipes import KINDS


def routes(service: Service) -> APIRouter:
    router, engine = APIRouter(), service.engine

    @router.get("/v1/kvquilt/state")
    async def state(request: Request) -> dict[str, Any]:
        tenant = record_of(request).tenant
        shelf = await asyncio.to_thread(service.library.shelf, tenant)
        with service.library.changed:
            states = Counter(entry.state for entry in shelf.values())
        return {
            "object": "kvquilt.state",
            "model": service.name,
            "max_model_len": engine.model.capability.max_length,
            "system": {"text": engine.template.system, "role": engine.template.system_role},
            "method": engine.settings.method,
            "methods": methods(engine),
            "documents": {each.value: states[each] for each in State},
            "store": await asyncio.to_thread(held, engine.store, namespace(tenant)),
            **service.tally(tenant).as_dict(),
        }

    return router


def methods(engine: Engine) -> list[dict[str, str]]:
    """What can be asked for with what is loaded."""
    trained, helper = engine.reader.trained, engine.reader.helper
    able = {
        name: method.summary
        for name, method in METHODS.items()
        if (method.writer not in KINDS or method.writer in trained)
        and (method.selector.probe is not Probe.HELPER or helper is not None)
    }
    auto = {"auto": "what the gate allows on these documents, else full prefill"}
    written = {name: able.get(name, "a trained writer of that name") for name in engine.reader.auto_order}
    return [{"name": name, "summary": summary} for name, summary in {**auto, **able, **written}.items()]


def held(store: Store, space: str) -> dict[str, dict[str, int | None]]:
    """Segments and bytes of one namespace by tier; None of a tier elsewhere, which would have to be walked."""
    found: dict[str, dict[str, int | None]] = {}
    for tier in store.tiers:
        sizes = [row.bytes for row in tier.rows(space)] if tier.lasting else None
        nothing: dict[str, int | None] = {"segments": None, "bytes": None}
        found[tier.name] = nothing if sizes is None else {"segments": len(sizes), "bytes": sum(sizes)}
    return found
