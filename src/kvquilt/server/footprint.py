"""Bytes of the caches that a prompt takes, while it is read and until its answer ends, and of compiling in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvquilt.model.slots import rounded
from kvquilt.prompt import Run
from kvquilt.reading import Reader
from kvquilt.repair.kept_blocks import KeptBlocks
from kvquilt.repair.presets import Method, find_method
from kvquilt.repair.selector import Probe
from kvquilt.store import Layout
from kvquilt.writers.batches import batches
from kvquilt.writers.constant import Constant
from kvquilt.writers.loaded import soft_rows

SLACK = 256  # slots that a recycled cache may have beyond what is asked for


def slots(tokens: int) -> int:
    """Of a cache with room for so many: whole blocks, and what a recycled one may have more."""
    return rounded(tokens) + SLACK


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one prompt.

    Attributes:
        stays: until the answer ends.
        reading: beside it until the prompt is read: compiling what is not stored, second caches of probes.
    """

    stays: int
    reading: int


def of_prompt(reader: Reader, runs: Sequence[Run], new: int, methods: Sequence[str]) -> Footprint:
    """At most, whichever of `methods` runs and whatever is stored, with `new` tokens of an answer."""
    soft = max(map(soft_rows, reader.trained.values()), default=0)
    documents = [len(run.ids) for run in runs if run.document is not None]
    whole = sum(len(run.ids) for run in runs) + soft * len(documents)
    unit = reader.layout().bytes_per_token
    stays = slots(whole + new) * unit
    beside = (_beside(reader, find_method(name), whole, documents, stays) for name in methods)
    return Footprint(stays, max(beside, default=0))


def of_compiling(reader: Reader, documents: Sequence[int], recipe: str = "") -> int:
    """At most, of a batch of documents and of what they are encoded behind; `documents`: tokens of each."""
    unit = reader.layout().bytes_per_token
    prefix = max(len(reader.writer.encoded_behind or ()), len(reader.preamble))
    if not isinstance(reader.recipe(recipe), Constant):
        # behind one another, in a cache that grows: the larger one is there before the smaller one goes
        return 2 * slots(prefix + sum(documents)) * unit
    soft = max(map(soft_rows, reader.trained.values()), default=0)
    lengths = [tokens + soft for tokens in documents]
    batch = max((len(b) * slots(prefix + max(lengths[i] for i in b)) for b in batches(lengths)), default=0)
    return (batch + slots(prefix)) * unit


def _beside(reader: Reader, method: Method, tokens: int, documents: Sequence[int], stays: int) -> int:
    if not method.reuses:
        return 0
    probe, helper = 0, reader.helper
    if isinstance(method.selector, KeptBlocks):  # what is kept is copied together
        probe = stays
    elif method.selector.probe is Probe.HELPER and helper is not None:
        c = helper.capability
        layout = Layout(helper.dtype, c.layers, c.kv_heads, c.key_dim, c.value_dim)
        probe = slots(tokens) * layout.bytes_per_token
    return max(probe, of_compiling(reader, [*documents, len(reader.preamble)], method.writer))
