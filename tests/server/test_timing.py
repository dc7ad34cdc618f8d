"""Nothing that one tenant did makes another's request faster: by what is counted, and by the time it takes."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvquilt.server import compiler
from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import KeyFile
from kvquilt.store import Store
from kvquilt.tokens import encoder
from tests.server.running import MODEL, Served, serving
from tests.server.test_tenants import ready, upload

WORDS = ("bakery", "opens", "at", "six", "but", "never", "on", "Mondays", "rye", "needs", "two", "days", "and", "salt")
PAIRS = 24
# Of 24 against 24 that differ by chance alone, a share beyond 0.5 +- 0.35 has a probability below 1e-4 even for one
# draw, and times are of the processor, which others' work hardly moves; a hit that were shared gives 0 or 1.
LEAST, MOST = 0.15, 0.85


def text(draw: random.Random, words: int = 70) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, Any, Any]]:
    """A server, and what asks it as either of two tenants."""
    monkeypatch.setattr(compiler.Compiler, "_measure", lambda self, tenant: self._measured.add(tenant))
    held, _, ann = KeyFile().added("ann")
    held, _, bob = held.added("bob")
    held.write(tmp_path / "keys")
    with serving(directory=tmp_path / "store", keyring=Keyring(tmp_path / "keys")) as served:
        yield served, ann, bob
        served.rests()


def asked(served: Served, key: str) -> Callable[[str], Any]:
    client = served.client(key)

    def ask(text: str) -> Any:
        content: Any = [{"type": "document", "id": "a", "text": text}, {"type": "text", "text": "When?"}]
        return client.chat.completions.create(
            model=MODEL, temperature=0, max_tokens=1, messages=[{"role": "user", "content": content}],
            extra_body={"kvquilt": {"method": "none"}},
        ).kvquilt  # fmt: skip

    return ask


def counted(account: dict[str, Any]) -> dict[str, Any]:
    """All that an account says but times."""
    return {name: value for name, value in account.items() if name != "seconds"}


def counts(served: Served) -> dict[str, Any]:
    """What the store found and read, and what was remembered of texts."""
    store: Store = served.engine.store
    read = encoder(served.engine.model.tokenizer)._segment.cache_info()
    return {**{name: stats.hits for name, stats in store.stats().items()}, "remembered": read.hits}


def test_another_tenants_text_is_a_miss_in_every_count(two: Any, tmp_path: Path) -> None:
    served, ann, bob = two
    draw = random.Random(0)
    hot, fresh = text(draw), text(draw)
    upload(served, ann, hot=hot)
    ready(served, ann, "hot")
    ask_ann, ask_bob = asked(served, ann), asked(served, bob)
    for _ in range(5):
        ask_ann(hot)
    assert ask_ann(hot)["documents"][0]["source"] == "memory"
    ask_bob("The opening is compiled once.")
    before = counts(served)
    first = ask_bob(hot)
    grown = {name: after - before[name] for name, after in counts(served).items()}
    assert first["documents"][0]["source"] == "compiled"
    assert first["documents"][0]["why"].endswith("(absent), compiled now")
    again = counts(served)
    ask_bob(fresh)
    assert grown == {name: after - again[name] for name, after in counts(served).items()}, "as what nobody ever had"
    with serving(directory=tmp_path / "other", keyring=served.service.keyring) as alone:
        asked(alone, bob)("The opening is compiled once.")
        assert counted(asked(alone, bob)(hot)) == counted(first), "as where the other never was"
        alone.rests()
    assert ask_bob(hot)["documents"][0]["source"] == "memory"


def share_slower(first: list[float], second: list[float]) -> float:
    """How often one of the first took longer than one of the second; 0.5 where nothing tells them apart."""
    won = sum((a > b) + 0.5 * (a == b) for a in first for b in second)
    return won / (len(first) * len(second))


def timed(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def test_another_tenants_text_takes_as_long_as_one_that_nobody_had(two: Any) -> None:
    served, ann, bob = two
    draw = random.Random(1)
    ask_ann, ask_bob = asked(served, ann), asked(served, bob)
    texts = [text(draw) for _ in range(2 * PAIRS)]
    hot, fresh = texts[:PAIRS], texts[PAIRS:]
    for each in hot:
        ask_ann(each)
        ask_ann(each)
    for _ in range(6):
        ask_bob(text(draw))
    gc.collect()
    order = [*((each, "theirs") for each in hot), *((each, "fresh") for each in fresh)]
    draw.shuffle(order)
    times: dict[str, list[float]] = {"theirs": [], "fresh": [], "own": []}
    for each, kind in order:
        times[kind].append(timed(lambda each=each: ask_bob(each)))
        times["own"].append(timed(lambda each=each: ask_bob(each)))
    assert LEAST < share_slower(times["fresh"], times["theirs"]) < MOST
    assert share_slower(times["fresh"], times["own"]) > MOST, "one's own hits are seen by these times"


def test_another_tenants_id_takes_as_long_as_one_that_nobody_has(two: Any) -> None:
    served, ann, bob = two
    draw = random.Random(2)
    ids = [f"{draw.randrange(1 << 60):x}" for _ in range(2 * PAIRS)]
    upload(served, ann, **{id: text(draw, 5) for id in ids[:PAIRS]})
    ready(served, ann, *ids[:PAIRS])
    http = served.http(bob)
    for each in ids[:5]:
        http.get(f"/v1/documents/x{each}")
    order, times = list(range(2 * PAIRS)), ([], [])
    draw.shuffle(order)
    for n in order:
        times[n >= PAIRS].append(timed(lambda n=n: http.get(f"/v1/documents/{ids[n]}")))
    assert LEAST < share_slower(*times) < MOST
