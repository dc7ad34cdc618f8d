"""Waiting for what other threads do, never longer than it may take."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until it holds, or fail."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.01)
