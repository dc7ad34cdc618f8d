"""What a stored object must be, and how one that is not is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvquilt.errors import IntegrityError


class Form(BaseModel):
    """These fields, and whatever else."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Exactly(Form):
    """These fields alone: what becomes an object of them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


def check_form(form: type[Form], value: Mapping[str, Any], where: str) -> None:
    """Raises `IntegrityError`: names `where` (file, line) and the first field that is not as it must be."""
    try:
        form.model_validate(value)
    except ValidationError as error:
        at = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
        rule = "is damaged, or of another version"
        raise IntegrityError(f"{where} {rule}: {at or 'all of it'}") from None  # the chained error quotes answers
