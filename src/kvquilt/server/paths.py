"""Names in paths that may hold any character, line breaks and slashes among them."""

from __future__ import annotations

from starlette.convertors import PathConvertor, register_url_convertor

WHOLE = "whole"


class Whole(PathConvertor):
    """The rest of a path. Starlette's own ends before a line break, and would take one document for another."""

    regex = r"[\s\S]*"


register_url_convertor(WHOLE, Whole())
