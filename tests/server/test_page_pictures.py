"""README's pictures of the page, with SmolLM2 and the documents of ``kvquilt serve --demo``.

``PAGE_PICTURES=docs pytest tests/server/test_page_pictures.py`` makes them anew: the settings' model must be there
(``kvquilt models fetch smollm2``).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvquilt import Engine
from kvquilt.cli.serve import _upload_demo
from kvquilt.server.service import Service
from tests import chromium
from tests.server.page_driver import opened
from tests.server.running import over

FOLDER = os.environ.get("PAGE_PICTURES", "")
_IDS = ("with", "try", "assert", "for", "while", "import", "del", "global")


@pytest.mark.skipif(not FOLDER or chromium.FOUND is None, reason="PAGE_PICTURES names no folder, or no chromium here")
def test_leave_the_pictures(tmp_path: Path) -> None:
    with Engine.load("smollm2", threads=2, store_dir=tmp_path / "store", conversations=0) as engine:
        service = Service(engine, "smollm2", tmp_path / "documents")
        service.compiler.gate = False  # it would measure while answers are timed
        _upload_demo(service)
        with (
            over(service) as served,
            chromium.chromium(tmp_path / "profile") as browser,
            opened(browser, served.url) as page,
        ):
            page.ready(*_IDS)
            page.tab.size(1180, 800)
            page.ask("What does the with statement do?", "retrieved-document", compare=True, length=40, seconds=300)
            page.js("document.activeElement.blur()")
            page.tab.picture(Path(FOLDER) / "page-compare.webp")
            page.click("#anew")
            page.ask("What does the assert statement do?", "retrieved-document", length=40, seconds=300)
            page.js("document.querySelector('.turn details').open = true")
            page.js("document.activeElement.blur()")
            page.tab.picture(Path(FOLDER) / "page.webp")
            assert page.js("document.querySelectorAll('.strip .run').length") == len(_IDS) + 2
    for name in ("page", "page-compare"):
        assert (Path(FOLDER) / f"{name}.webp").stat().st_size < 200_000
