"""Rotary tables read off a model, and the rotation that moves keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SCRATCH_BYTES = 1 << 20  # stays in a core's second-level cache


@dataclass(eq=False, slots=True)
class RotaryTable:
    """One layer type's rotation: `inv_freq` ``[rotary_dim / 2]`` fp32, unscaled.

    Attention scaling (YaRN) is part of the stored keys already and must not be applied a second time; a pure
    rotation by ``inv_freq * delta`` is exact for every static table. Channels past `rotary_dim` carry no
    position and are copied.
    """

    inv_freq: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def rotate(self, keys: torch.Tensor, delta: int, out: torch.Tensor) -> None:
        """Rotate by `delta` positions, in fp32, cast once.

        Args:
            keys: ``[layers, ..., tokens, key_dim]``; `out` likewise, any strides, overwritten.
        """
        # float64 angles: at a delta of 8,000 an fp32 product alone loses 5e-4 of a turn
        angle = (self.inv_freq.double() * delta).remainder(2 * torch.pi)
        cos, sin = angle.cos().float(), angle.sin().float()
        cos = torch.cat((cos, cos))
        half, width = len(sin), len(cos)
        # a few layers at a time in scratch that is allocated once: fresh memory costs a page fault per 4 KiB
        step = max(1, _SCRATCH_BYTES // max(1, keys[0].numel() * 4))
        scratch = keys.new_empty(2, min(step, len(keys)), *keys.shape[1:-1], width, dtype=torch.float32)
        for first in range(0, len(keys), step):
            source, target = keys[first : first + step], out[first : first + step]
            x, turned = scratch[:, : len(source)]
            x.copy_(source[..., :width])
            torch.mul(x, cos, out=turned)
            turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
            turned[..., half:].addcmul_(x[..., :half], sin)
            target[..., :width].copy_(turned)
        if width < keys.shape[-1]:
            out[..., width:].copy_(keys[..., width:])
