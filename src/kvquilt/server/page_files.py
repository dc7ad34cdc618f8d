"""``/``: the page, as its files are in the package, under a policy that lets nothing else in."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from blake3 import blake3
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# scripts of this server alone, no markup made by them, no address but this one, no frame around it
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for anew with every visit, and sent only if it has changed
}


@dataclass(frozen=True, slots=True)
class File:
    """One file of the page; `etag` is of its content."""

    content: bytes
    kind: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        return cls(content, TYPES[name.rpartition(".")[2]], f'"{blake3(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag}
        known = request.headers.get("if-none-match", "").split(",")
        if self.etag in (each.strip().removeprefix("W/") for each in known):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.kind)


def routes() -> APIRouter:
    """Nobody is asked for a key here: the page holds no data, and asks for the key itself."""
    router = APIRouter(include_in_schema=False)
    folder = files("kvquilt.server").joinpath("page")
    held = {each.name: File.of(each.name, each.read_bytes()) for each in folder.iterdir() if "." in each.name}

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return held["index.html"].answer(request)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(request: Request, name: str) -> Response:
        if name not in held:
            raise HTTPException(404)
        return held[name].answer(request)

    return router
