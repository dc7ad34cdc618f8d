"""Rotary tables read off a model, and the rotation that moves keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
        """Rotate `keys` ``[..., tokens, key_dim]`` by `delta` positions into `out` (same shape), in fp32, cast once."""
        # float64 angles: at a delta of 8,000 an fp32 product alone loses 5e-4 of a turn
        angle = (self.inv_freq.double() * delta).remainder(2 * torch.pi)
        cos, sin = angle.cos().float(), angle.sin().float()
        half, width = len(self.inv_freq), self.rotary_dim
        x = keys[..., :width].float()
        turned = x * torch.cat((cos, cos))
        turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
        turned[..., half:].addcmul_(x[..., :half], sin)
        out[..., :width].copy_(turned)
        if width < keys.shape[-1]:
            out[..., width:].copy_(keys[..., width:])
