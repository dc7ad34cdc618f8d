"""Bad input: one clear line, the right exit code, JSON where asked; and nothing heavy loaded."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from kvquilt.cli.app import EPILOG, exit_code
from kvquilt.cli.ask import reuse_failed
from kvquilt.cli.common import ExitCode, _finite, arms_and_writers, echo_table, method_names
from kvquilt.errors import ConfigError, ModelNotFoundError, NumericsError, PromptError, StoreUnavailableError
from kvquilt.ledger import Ledger
from tests.cli.conftest import Run
from tests.models import build
from tests.tokenizers import chatml_tokenizer


def test_unknown_settings_name_the_nearest(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("stor_dir: /x\n")
    outcome = run("--config", file, "config", "show", "--json")
    assert outcome.code == 2
    assert "did you mean 'store_dir'" in outcome.err
    assert outcome.json["error"]["type"] == "ConfigError"
    assert outcome.json["error"]["field"].startswith("stor_dir")


def test_config_show_names_each_source(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("top_k: 2\n")
    shown = run("--config", file, "--store-dir", "/elsewhere", "config", "show", "--json").json
    assert shown["top_k"] == {"value": 2, "source": f"file {file}"}
    assert shown["store_dir"] == {"value": "/elsewhere", "source": "flag"}
    assert shown["cache_dir"]["source"] == "environment KVQUILT_CACHE_DIR"
    assert shown["model"] == {"value": "smollm2", "source": "default"}
    assert "environment KVQUILT_CACHE_DIR" in run("config", "show").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ask", "--docs", ".", "  "], "question"),
        (["ask", "--docs", "nowhere-at-all", "q"], "no such folder"),
        (["compile", "nowhere-at-all"], "no such folder"),
        (["doctor", "x", "--docs", "nowhere-at-all"], "no such folder"),
        (["ask", "--docs", ".", "q", "--method", "nonne"], "did you mean 'none'"),
        (["ask", "--docs", ".", "q", "--method", "retrieved-dokument:5%"], "did you mean 'retrieved-document'"),
        (["ask", "--docs", ".", "q", "--method", "none:keep=3"], "none has no option 'keep'"),
        (["ask", "--docs", ".", "q", "--method", "none", "--budget", "5 percent"], "write a share such as 5%"),
        (["ask", "--docs", ".", "q", "--method", "none", "--budget", "100.5%"], "between 0% and 100%"),
        (["ask", "--docs", ".", "q", "--method", "none", "--budget=-5%"], "between 0% and 100%"),
        (["ask", "--docs", ".", "q", "--method", "none", "--budget=-1"], "at least 0"),
        (["ask", "--docs", ".", "q", "--method", "none:101%"], "between 0% and 100%"),
        (["ask", "--docs", ".", "q", "--budget", "5%"], "auto runs what was measured"),
        (["ask", "--docs", ".", "q", "--method", "full", "--budget", "5%"], "full prefill computes everything"),
        (["ask", "--docs", ".", "q", "--top-k", "0"], "top_k"),
        (["ask", "--docs", ".", "q", "--policy", "never"], "policy"),
        (["doctor", "--methods", "none,nonne"], "did you mean 'none'"),
        (["doctor", "--methods", " , "], "name at least one"),
        (["ask", "--docs", ".", "q", "--method", "cacheclip"], "--helper-model"),
        (["doctor", "--methods", "cacheclip:group=4"], "--helper-model"),
        (["models", "fetch", "smolm2"], "did you mean 'smollm2'"),
        (["store", "rm", "--all", "--tenant", "x"], "exactly one"),
        (["askk"], "askk"),
        (["ask", "q"], "--docs"),
    ],
)
def test_bad_input_ends_with_2_and_names_the_field(run: Run, arguments: list[str], said: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert said in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("options", [("--method", "non"), ("--method", "none", "--budget", "200%")])
def test_a_bad_method_or_budget_is_a_json_error_where_json_was_asked(run: Run, options: tuple[str, ...]) -> None:
    outcome = run("ask", "--docs", ".", "q", "--json", *options)
    assert outcome.code == 2
    error = outcome.json["error"]
    assert error["field"].startswith(options[-2].removeprefix("--"))
    assert error["rule"] in outcome.err


def test_a_folder_without_text_is_refused(run: Run, tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    outcome = run("compile", tmp_path / "empty")
    assert outcome.code == 2
    assert "no readable text" in outcome.err


def test_a_missing_model_ends_with_3(run: Run, tmp_path: Path, docs: Path) -> None:
    for arguments in (["models", "check", tmp_path / "none"], ["compile", docs, "--model", tmp_path / "none"]):
        outcome = run(*arguments)
        assert outcome.code == 3
        assert outcome.err.splitlines()[-1].startswith("kvquilt: error: ")


def test_a_model_folder_without_tokenizer_ends_with_3(run: Run, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "bare")
    outcome = run("models", "check", tmp_path / "bare", "--json")
    assert outcome.code == 3
    assert "tokenizer" in outcome.json["error"]["message"]


def test_an_unsupported_model_is_a_row_with_its_reason(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "soft"
    build("llama").save_pretrained(folder)
    chatml_tokenizer().save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    config.attn_logit_softcapping = 50.0
    config.save_pretrained(folder)
    outcome = run("models", "check", folder, "--json")
    assert outcome.code == 3
    assert outcome.json["reusable"] is False
    assert "soft-capping" in outcome.json["reason"]


def test_models_list_shows_the_default_and_local_ones(
    run: Run, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQUILT_MODELS_DIR", str(model_folder.parent))
    rows = run("models", "list", "--json").json
    assert rows[0]["model"] == "smollm2"
    assert {"model": "tiny", "kind": "folder", "where": str(model_folder)} in rows


def test_every_deliberate_failure_has_its_code_and_the_help_names_all() -> None:
    cases = {
        ConfigError("a", "b"): 2,
        PromptError("a", "b"): 2,
        ModelNotFoundError("x"): 3,
        NumericsError("x"): 3,
        StoreUnavailableError("x"): 4,
    }
    assert {error: int(exit_code(error)) for error in cases} == cases
    assert all(f"{code.value} " in EPILOG for code in ExitCode)


@pytest.mark.parametrize(
    ("asked", "ran", "reason", "failed"),
    [
        ("none", "full", "no_verdict", True),
        ("auto", "full", "gate_refused", False),
        ("auto", "none", "nothing_reused", True),
        ("none", "none", None, False),
        ("full", "full", None, False),
    ],
)
def test_when_reuse_counts_as_failed(asked: str, ran: str, reason: str | None, failed: bool) -> None:
    ledger = Ledger(method=ran, asked=asked)
    if reason:
        ledger.fall_back(reason, "")
    assert reuse_failed(asked, ledger) is failed


def test_cells_of_a_table_do_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    echo_table(("group", "n"), [("a\x1b[31m\x07b\nc\r", "1"), ("d", "2")])
    assert capsys.readouterr().out == "group        n\na\ufffd[31m\ufffdb c\ufffd  1\nd            2\n"


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("none", ["none"]),
        ("none, retrieved-document", ["none", "retrieved-document"]),
        ("epic:k=16,writer=isolated,none", ["epic:k=16,writer=isolated", "none"]),
        ("epic,k=16,5%,cacheblend:15%,13000,none", ["epic:k=16,5%", "cacheblend:15%,13000", "none"]),
        ("epic:k=16;none ;", ["epic:k=16", "none"]),
        ("5%", ["5%"]),
        (",", []),
    ],
)
def test_a_list_of_methods_keeps_options_with_their_method(written: str, names: list[str]) -> None:
    assert method_names(written) == names


@pytest.mark.parametrize(
    ("written", "names", "folders"),
    [
        ("full,none,epic:k=16,cacheblend:15%", ["full", "none", "epic:k=16", "cacheblend:15%"], ["given"]),
        ("sempic:a/b+retrieved_document:5%", ["retrieved-document:5%,writer=sempic"], ["given", "a/b"]),
        ("sempic:./a,sempic:./a+epic", ["sempic", "epic:writer=sempic"], ["given", "./a"]),
        ("sempic:a+retrieved_document:5%", ["retrieved-document:5%,writer=sempic"], ["given", "a"]),
        ("sempic:no-such-folder", ["sempic"], ["given", "no-such-folder"]),
        ("sempic:./a+b+infoflow:5%,layers=1+2", ["infoflow:5%,layers=1+2,writer=sempic"], ["given", "./a+b"]),
        ("sempic:./a+nine", ["nine:writer=sempic"], ["given", "./a"]),
        ("sempic:5%", ["sempic:5%"], ["given"]),
        ("kv-packet+infoflow", ["infoflow:writer=kv-packet"], ["given"]),
        ("infoflow:layers=-4+-3", ["infoflow:layers=-4+-3"], ["given"]),
        ("sempic:order=target_last", ["sempic:order=target_last"], ["given"]),
    ],
)
def test_a_trained_writer_may_bring_its_folder_and_a_repair(written: str, names: list[str], folders: list[str]) -> None:
    assert arms_and_writers(written, ["given"]) == (names, folders)


def test_numbers_that_json_lacks_become_null() -> None:
    assert json.dumps(_finite({"a": [float("nan"), 1.5], "b": (float("inf"),)})) == '{"a": [null, 1.5], "b": [null]}'


def test_help_and_config_show_load_no_torch() -> None:
    code = (
        "import sys; from kvquilt.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & {*sys.modules}), file=sys.stderr)"
    )
    for arguments in (["--help"], ["ask", "--help"], ["config", "show"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stderr == "[]\n"


def test_remarks_leave_out_what_the_ledger_shows(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("store", "stats")  # installs the handler
    Ledger().fall_back("load_failed", "stands in the ledger")
    logging.getLogger("kvquilt.model").warning("the memo is gone")
    assert capsys.readouterr().err == "kvquilt: warning: the memo is gone\n"
