"""The encoder's parameters (COMB, arXiv 2602.01519), and its student: documents through the encoder, the rest through
the reader with cross layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kvquilt.errors import InputError
from kvquilt.model.chunk_encoder import encode
from kvquilt.model.cross_attention import CrossAttention
from kvquilt.model.graph import Read, read
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts
from kvquilt.model.rows import Pair
from kvquilt.training.begun import Begun
from kvquilt.training.lesson import Lesson
from kvquilt.training.student import Student
from kvquilt.training.teacher import Branches
from kvquilt.writers.batches import padded
from kvquilt.writers.encoder import Encoder, make_encoder


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes of an encoder; heads and widths are the model's. A `Trainable`.

    Attributes:
        every: a cross layer before each decoder layer ``every - 1``, ``2 every - 1``, ..., and an encoder layer for it.
    """

    every: int = 4

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError("every", "at least 1", self.every)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Encoder layers, the projections of their output, the reader's cross layers."""
        return "encoder", "memory", "cross"

    @property
    def plain(self) -> bool:
        return False  # gates are 0: documents are not seen at all

    @property
    def rows(self) -> int:
        return 0

    def kind_of(self, name: str) -> str:
        return name.split(".", 1)[0]

    def soft(self, name: str) -> bool:
        return name.endswith("gate")

    def sized(self, start: Begun) -> EncoderShape:
        return EncoderShape(start.every) if start.every else self

    def drawn(self, model: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
        """Tensors to begin with, fp32, named as in `CrossAttention` and `encode`.

        Encoder layers are copies of the model's first ones; gates are 0, so the reader begins as the plain model.

        Raises:
            InputError: the model has fewer than `every` layers.
        """
        c = model.capability
        count = c.layers // self.every
        if not count:
            raise InputError("every", f"at most the {c.layers} layers of {model.name}", self.every)
        layers: Any = model.hf.base_model.layers
        embeddings: Any = model.hf.get_input_embeddings()
        width, dim = embeddings.weight.shape[1], c.key_dim
        inner, own, shared = model.hf.config.get_text_config().intermediate_size, c.heads * dim, c.kv_heads * dim
        matrices = {
            "memory.k_proj": (shared, width),
            "memory.v_proj": (shared, width),
            "cross.q_proj": (own, width),
            "cross.o_proj": (width, own),
            "cross.gate_proj": (inner, width),
            "cross.up_proj": (inner, width),
            "cross.down_proj": (width, inner),
        }
        norms = {"memory.norm": width, "cross.norm": width, "cross.mlp_norm": width}
        norms |= {"cross.q_norm": dim, "cross.k_norm": dim}
        draw = torch.Generator().manual_seed(seed)
        named: dict[str, torch.Tensor] = {}
        for n in range(count):
            named |= {f"encoder.{n}.{name}": p.detach().float().clone() for name, p in layers[n].named_parameters()}
            made = {name: torch.randn(size, generator=draw) / math.sqrt(size[1]) for name, size in matrices.items()}
            made |= {name: torch.ones(size) for name, size in norms.items()}
            made |= {name: torch.zeros(1) for name in ("cross.gate", "cross.mlp_gate")}
            named |= {name.replace(".", f".{n}.", 1): tensor.to(model.device) for name, tensor in made.items()}
        return named

    def parts(self, named: Mapping[str, torch.Tensor]) -> Parts:
        return Parts(cross=CrossAttention(self.every, named))

    def pupil(self, model: LanguageModel, prefix: tuple[int, ...], keep_all: bool) -> EncoderStudent:
        if prefix:
            raise InputError("shared_prefix", "an encoder encodes every document alone")
        return EncoderStudent(model, keep_all=keep_all)

    def writer(
        self,
        kind: str,
        model: LanguageModel,
        named: Mapping[str, torch.Tensor],
        prefix: tuple[int, ...],
        base_name: str,
    ) -> Encoder:
        return make_encoder(model.fingerprint, named, self.every, base_name)


class EncoderStudent(Student):
    """As `Student`, with an encoder as the writer, and documents seen through cross layers.

    With `keep_all` the encoder keeps what it computes between its ends; otherwise it runs again in backward.
    """

    def _written(
        self, parts: Parts, lessons: Sequence[Lesson]
    ) -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, int]]]]:
        documents = [ids for each in lessons for ids in each.documents]
        given = self.model, padded(documents), list(map(len, documents)), _cross(parts)
        keys, values = (
            encode(*given)
            if self.keep_all
            else checkpoint(encode, *given, use_reentrant=False, preserve_rng_state=False)
        )
        flat = [torch.cat([t[:, n, :, : len(ids)] for n, ids in enumerate(documents)], 2) for t in (keys, values)]
        firsts = accumulate(map(len, documents), initial=0)
        return flat[0], flat[1], [[(next(firsts), len(ids)) for ids in each.documents] for each in lessons]

    def _one(
        self,
        parts: Parts,
        lesson: Lesson,
        branches: Branches,
        keys: torch.Tensor,
        values: torch.Tensor,
        places: Sequence[tuple[int, int]],
        hidden: bool,
        order: Sequence[int] | None,
    ) -> Read:
        taken = list(places) if order is None else [places[i] for i in order]
        seen = (torch.cat([t[:, :, first : first + n] for first, n in taken], 2) for t in (keys, values))
        reader = Parts(cross=_cross(parts).over(*seen))
        slots, plan = self._opening(lesson.opening), branches.plan(len(lesson.opening))
        return read(self.model, branches.ids, plan, slots, branches.tail, parts=reader, hidden=hidden)

    def _opening(self, ids: tuple[int, ...]) -> list[Pair]:
        """By layer, keys and values of what stands in front of the documents, read by the plain model."""
        c, dtype, device = self.model.capability, self.model.dtype, self.model.device
        empty = [torch.empty(1, c.kv_heads, 0, dim, dtype=dtype, device=device) for dim in (c.key_dim, c.value_dim)]
        return self.fixed(ids) or [(empty[0], empty[1])] * c.layers


def _cross(parts: Parts) -> CrossAttention:
    if parts.cross is None:
        raise InputError("parts", "an encoder's, with cross layers")
    return parts.cross
