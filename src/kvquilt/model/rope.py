"""Rotary tables read off a model, and the rotation that moves keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SCRATCH_BYTES = 1 << 20  # stays in a core's second-level cache


@dataclass(frozen=True, eq=False, slots=True)
class Angles:
    """Cosines and sines of some positions, ``[positions, rotary_dim / 2]`` fp32 each."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, indices: torch.Tensor) -> Angles:
        """Those of some of them."""
        where = indices.to(self.cos.device)
        return Angles(self.cos[where], self.sin[where])


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

    def angles(self, positions: torch.Tensor) -> Angles:
        """Of ``[n]`` int64 positions, on the table's device."""
        # float64: at a position of 8,000 an fp32 product alone loses 5e-4 of a turn
        turns = positions.to(self.inv_freq.device).double()[:, None] * self.inv_freq.double()
        turns = turns.remainder(2 * torch.pi)
        return Angles(turns.cos().float(), turns.sin().float())

    def rotate(self, keys: torch.Tensor, delta: int, out: torch.Tensor) -> None:
        """Rotate by `delta` positions, in fp32, cast once.

        Args:
            keys: ``[layers, ..., tokens, key_dim]``; `out` likewise, any strides, overwritten.
        """
        angles = self.angles(torch.tensor([delta]))
        cos, sin = torch.cat((angles.cos[0], angles.cos[0])), angles.sin[0]
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


def turned(keys: torch.Tensor, angles: Angles, back: bool = False) -> torch.Tensor:
    """A copy with every row rotated by its own angle, or back by it.

    Args:
        keys: ``[..., tokens, key_dim]`` fp32; channels past the rotary ones are copied.
        angles: of ``tokens`` positions.
    """
    cos, sin = angles.cos, -angles.sin if back else angles.sin
    half = cos.shape[-1]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
