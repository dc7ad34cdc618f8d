"""One real server over a tiny model for the tests of a file, at rest after each."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.server.running import Served, serving

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # before it is imported
os.environ["LANGSMITH_TRACING"] = "false"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


@pytest.fixture(autouse=True)
def _at_rest(served: Served) -> Iterator[None]:
    yield
    served.rests()
