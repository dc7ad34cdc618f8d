"""Where compiled segments are kept: memory over disk over a server that machines share, behind one small interface."""

from kvquilt.store.base import Failure, FailureReason, Hit, Layout, Miss, MissReason, Row, Stored, Tier, TierStats
from kvquilt.store.disk import DiskTier
from kvquilt.store.maintenance import GcReport, VerifyReport
from kvquilt.store.memory import MemoryTier
from kvquilt.store.quotas import Quotas
from kvquilt.store.remote import RemoteTier
from kvquilt.store.store import Held, Store

__all__ = [
    "DiskTier",
    "Failure",
    "FailureReason",
    "GcReport",
    "Held",
    "Hit",
    "Layout",
    "MemoryTier",
    "Miss",
    "MissReason",
    "Quotas",
    "RemoteTier",
    "Row",
    "Store",
    "Stored",
    "Tier",
    "TierStats",
    "VerifyReport",
]
