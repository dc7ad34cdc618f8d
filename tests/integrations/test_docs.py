"""The examples of the pages run as they stand, against a tiny server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.running import MODEL, Served

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS, NAME = "http://127.0.0.1:8000", '"smollm2"'
NEEDED = {"langchain": "langchain_openai", "llama_index": "llama_index.core", "haystack": "haystack"}


def blocks(language: str) -> list[tuple[str, str]]:
    """Of both pages: a name for each, and its text."""
    found = []
    for page in ("server.md", "integrations.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.S | re.M):
            found += [(f"{page}: {heading}", each) for each in re.findall(rf"```{language}\n(.*?)```", body, re.S)]
    return found


def test_the_pages_show_every_client() -> None:
    names = {name for name, _ in blocks("python")}
    assert {f"integrations.md: {each}" for each in ("LangChain", "LlamaIndex", "Haystack")} <= names
    assert {f"server.md: With {each}" for each in ("OpenAI's client", "LangChain")} <= names


@pytest.mark.parametrize(("name", "code"), [pytest.param(*each, id=each[0]) for each in blocks("python")])
def test_an_example_runs(name: str, code: str, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for imported, needed in NEEDED.items():
        if f"kvquilt.integrations.{imported}" in code:
            pytest.importorskip(needed, reason=f"pip install 'kvquilt[{imported.replace('_', '-')}]'")
    assert ADDRESS in code
    exec(code.replace(ADDRESS, served.url).replace(NAME, f'"{MODEL}"'), {"__name__": "example"})
    assert "reused" in capsys.readouterr().out or name == "server.md: With LangChain"


def test_the_lines_for_curl_run(served: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    (code,) = [each for name, each in blocks("sh") if name == "server.md: With curl"]
    script = code.replace("curl ", "curl --silent --show-error --fail-with-body ").replace(ADDRESS, served.url)
    done = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"bread"' in done.stdout
    assert '"explain"' in done.stdout
