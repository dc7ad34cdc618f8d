"""A trained writer as a folder: ``writer.json``, the adapter in PEFT's own layout, soft tokens beside it.

writer.json                 kind, base model's fingerprint, sizes, prefix, how it was trained and measured
adapter_config.json         as PEFT reads it, where there is an adapter
adapter_model.safetensors
soft_tokens.safetensors     header [h, width], trailer [t, width], fp32
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.parts import parts_of
from kvquilt.writers.trained import Trained


def make_writer(
    kind: str, base: str, named: Mapping[str, torch.Tensor], alpha: float, prefix: tuple[int, ...] = ()
) -> Trained:
    """A writer of trained tensors.

    Args:
        named: see `parts_of`; kept in fp32.
    """
    kept = {name: tensor.detach().float().contiguous() for name, tensor in sorted(named.items())}
    fields: list[tuple[str, bytes | str | None]] = [("kind", kind), ("base", base), ("prefix", encode_ids(prefix))]
    fields += [("alpha", repr(float(alpha)))]
    fields += [(f"{name} {tuple(t.shape)}", t.cpu().numpy().tobytes()) for name, t in kept.items()]
    sizes = {name: len(kept[name]) if name in kept else 0 for name in ("header", "trailer")}
    digest = digest_fields("kvquilt 2026-11 writer trained v1", fields)
    return Trained(kind, base, parts_of(kept, alpha), **sizes, prefix=prefix, digest=digest)
