"""One line of JSON for every request, when it has ended; ids and numbers, no key and no text."""

from __future__ import annotations

import json
import logging
import time
import traceback
from typing import Any

from kvquilt.errors import KvquiltError
from kvquilt.server.failures import RefusalError, refusal
from kvquilt.server.record import Record

log, _uvicorn = logging.getLogger("kvquilt.server"), logging.getLogger("uvicorn.error")
_traces = logging.getLogger("opentelemetry")  # says that a collector cannot be reached


class JsonLines(logging.Formatter):
    """A record of the log as one line of JSON; what the caller gives as ``extra={"facts": ...}`` stands beside."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        facts: dict[str, Any] = getattr(record, "facts", {})
        return json.dumps({**line, **facts}, ensure_ascii=False, default=str)


def to_stderr(level: str) -> logging.Handler:
    """Send the server's log, and warnings of libraries, to stderr from `level` on; returns the handler to `detach`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    theirs = "warning" if level in ("debug", "info") else level
    for each, least in ((log, level), (_uvicorn, theirs), (_traces, theirs)):
        each.addHandler(handler)
        each.setLevel(least.upper())
        each.propagate = False  # the command line's own remarks would say everything twice
    return handler


def detach(handler: logging.Handler) -> None:
    for each in (log, _uvicorn, _traces):
        each.removeHandler(handler)
        each.propagate = True


def finished(record: Record) -> None:
    facts: dict[str, Any] = {"request_id": record.id, "method": record.method, "path": record.path}
    facts |= {"status": record.status, "seconds": round(record.seconds, 4), "tenant": record.tenant}
    facts |= {"fault": record.fault} if record.fault else {}
    level = logging.ERROR if record.status >= 500 and record.status != 503 else logging.INFO
    log.log(level, "request", extra={"facts": {**facts, **record.facts}})


def failed(record: Record, error: Exception) -> RefusalError:
    """What to tell the client of `error`; noted in `record`, with a line of its own if nobody raised it on purpose."""
    told = refusal(error)
    record.fault = told.code
    if not isinstance(error, RefusalError | KvquiltError):
        record.fault = type(error).__name__
        # places alone: the message of an exception may hold a text
        places = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        log.error("failure", extra={"facts": {"request_id": record.id, "fault": record.fault, "at": places}})
    return told
