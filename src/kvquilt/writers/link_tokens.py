"""Link tokens (KVLink, arXiv 2502.16002): trained tokens behind every document that each request computes anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from kvquilt.errors import InputError
from kvquilt.identity import Fingerprint
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import SOFT, Parts, soft_ids
from kvquilt.placement import Order, Placement, place_runs
from kvquilt.prompt import Run
from kvquilt.writers.folder import SOFT_TOKENS, save_folder
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.manifest import NOTHING, base_of, check_base, check_content, manifest
from kvquilt.writers.tensors import content_digest, read_tensors

LINK_TOKENS = "link-tokens"  # the kind, and the name of its method


@dataclass(frozen=True, slots=True)
class LinkTokens:
    """Trained tokens that stand behind every document of a prompt; `inner` encodes the documents themselves.

    They are inline rows: a link sees its own document, all earlier ones and their links, so that what a document alone
    could not know is computed in a few rows per request. What is stored is `inner`'s, under its keys.

    Attributes:
        base: fingerprint of the one model they were trained for.
        links: ``[sets, each, width]`` fp32; one set for all documents, or a set for each place in a prompt.
        content: their identity, over all of the above.
        base_name: what a person calls the model.
    """

    base: Fingerprint
    links: torch.Tensor = field(repr=False, compare=False)
    inner: Isolated
    content: str
    base_name: str = field(default="", compare=False)

    @classmethod
    def of(
        cls, base: Fingerprint, links: torch.Tensor, prefix: tuple[int, ...] = (), base_name: str = ""
    ) -> LinkTokens:
        """A copy of trained links; documents are encoded behind `prefix`.

        Raises:
            InputError: links of another form, or not finite.
        """
        if links.ndim != 3 or 0 in links.shape or not bool(torch.isfinite(links).all()):
            raise InputError("links", "finite numbers [sets, each, width], none of them 0", tuple(links.shape))
        if not all(0 <= i < SOFT for i in prefix):
            raise InputError("prefix", "must be token ids", prefix)
        kept = links.detach().to(torch.float32, copy=True).contiguous()
        digest = content_digest(LINK_TOKENS, base, {"links": kept}, 0.0, prefix)
        return cls(base, kept, Isolated(prefix), digest, base_name)

    @property
    def kind(self) -> str:
        return LINK_TOKENS

    def on(self, device: torch.device) -> LinkTokens:
        """The same with its tensors there."""
        return replace(self, links=self.links.to(device))

    def named(self) -> dict[str, torch.Tensor]:
        return {"links": self.links.cpu()}

    def parts(self) -> Parts:
        """What forwards over a prompt with links need."""
        return Parts(soft=self.links.flatten(0, 1))

    def check(self, model: LanguageModel) -> None:
        """Raise `WriterMismatchError`, saying what differs, unless `model` is the one they were trained for."""
        check_base("a set of link tokens", self.base, self.base_name, model)

    def linked(self, placement: Placement, order: Order) -> Placement:
        """The prompt with an inline run of links behind each of its documents.

        Raises:
            InputError: an order that stands documents side by side, or more documents than there are places.
        """
        if order in (Order.SHARED_POSITIONS, Order.DENSITY_ASCENDING):
            rule = "link tokens stand between the documents, which cannot share positions"
            raise InputError("order", rule, str(order))
        sets, each, _ = self.links.shape
        places, runs = placement.documents(), []
        for i, run in enumerate(placement.runs):
            runs.append(run)
            if run.document is not None:
                runs.append(Run(link_ids(sets, each, places.index(i))))
        return place_runs(runs, ranking=[places.index(i) for i in placement.ranking])

    def save(self, path: Path, recipe: Mapping[str, Any] = NOTHING, metrics: Mapping[str, Any] = NOTHING) -> str:
        """Write the folder that `from_folder` reads, as `Trained.save` does; returns `content`."""
        about = manifest(LINK_TOKENS, self.content, self.base, self.base_name, recipe, metrics)
        about |= {"sizes": {"links": list(self.links.shape)}, "prefix": list(self.inner.prefix)}
        save_folder(path, about, {SOFT_TOKENS: save(self.named(), {"format": "pt"})})
        return self.content

    @classmethod
    def from_folder(cls, about: Mapping[str, Any], files: Mapping[str, bytes]) -> LinkTokens:
        """From what `load_folder` gives, which has verified the files.

        Raises:
            InputError, WriterError: links of another form, or content that is not what was saved.
            KeyError, TypeError, ValueError: something is missing, or has another form.
        """
        prefix = tuple(int(i) for i in about["prefix"])
        links = read_tensors(files, SOFT_TOKENS)["links"]
        made = cls.of(base_of(about), links, prefix, str(about["base"]["name"]))
        check_content(made.content, about)
        return made


def link_ids(sets: int, each: int, document: int) -> tuple[int, ...]:
    """Ids of the soft tokens behind the document at that place, counted from 0.

    Raises:
        InputError: places have link tokens of their own, and this one has none.
    """
    if 1 < sets <= document:
        raise InputError("documents", f"at most {sets}: each place has link tokens of its own", document + 1)
    return soft_ids(each, document % sets * each)
