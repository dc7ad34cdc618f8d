"""Uploaded texts on disk: a file each, for nobody but the owner, apart by tenant."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from blake3 import blake3
from pydantic import TypeAdapter

from kvquilt.errors import InputError
from kvquilt.files import write_atomically, writing
from kvquilt.identity import namespace
from kvquilt.prompt import Document, check_documents
from kvquilt.server.messages import made_document

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A document as it was uploaded; `created` in seconds since the epoch."""

    id: str
    text: str
    title: str | None
    created: int

    @classmethod
    def now(cls, id: str | None, text: str, title: str | None) -> Uploaded:
        """Named by its text where no id is given.

        Raises:
            InputError: an id or a text that is none.
        """
        return cls(made_document(id, text, title).id, text, title, int(time.time()))

    @property
    def document(self) -> Document:
        return made_document(self.id, self.text, self.title)

    def of(self, tenant: str | None) -> Document:
        """The same as a document of this tenant, which nobody else's prompt may hold."""
        return replace(self.document, tenant=tenant)

    @property
    def digest(self) -> str:
        """Of what the model reads."""
        return blake3(self.document.text.encode()).hexdigest()


_FORM = TypeAdapter(Uploaded)


@dataclass(frozen=True, slots=True)
class Texts:
    """Below one folder: ``<namespace of the tenant>/<digest of the id>.json``."""

    folder: Path

    def write(self, tenant: str | None, uploaded: Uploaded) -> None:
        """Keep it, whole or not at all.

        Raises:
            StoreUnavailableError: the file system refuses.
        """
        path = self._path(tenant, uploaded.id)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, json.dumps(asdict(uploaded)).encode(), private=True)

    def read(self, tenant: str | None, id: str) -> Uploaded | None:
        """The document, or None where there is none that can be read."""
        found = _read(self._path(tenant, id))
        return found if found is not None and found.id == id else None

    def remove(self, tenant: str | None, id: str) -> None:
        path = self._path(tenant, id)
        with writing(path):
            path.unlink(missing_ok=True)

    def all(self, tenant: str | None) -> Iterator[Uploaded]:
        """The tenant's documents; a damaged file is said in the log and left out."""
        space = self.folder / namespace(tenant)
        for path in sorted(space.glob("*.json")) if space.is_dir() else ():
            if (found := _read(path)) is not None:
                yield found

    def _path(self, tenant: str | None, id: str) -> Path:
        return self.folder / namespace(tenant) / f"{blake3(id.encode()).hexdigest()[:40]}.json"


def _read(path: Path) -> Uploaded | None:
    try:
        found = _FORM.validate_json(path.read_bytes(), strict=True)
        check_documents([found.document])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InputError) as error:  # pydantic's is a ValueError
        log.error("an uploaded document cannot be read: %s (%s)", path.name, type(error).__name__)
        return None
    return found
