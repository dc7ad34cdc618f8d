"""The benchmark's own rules: no path of a machine in its results, and no figure from a process that died."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from kvquilt import bench
from kvquilt.bench import TtftPlan, environment, portable
from kvquilt.config import Settings
from kvquilt.errors import ModelError
from tests.models import build
from tests.tokenizers import chatml_tokenizer


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("/home/me/models/tiny", "tiny"),
        ("--json=/home/me/out.json", "--json=out.json"),
        ("~/out.json", "out.json"),
        ("jsonl:/home/me/mine.jsonl,tuning=../other.jsonl,share=1", "jsonl:mine.jsonl,tuning=other.jsonl,share=1"),
        ("mine=~/writers/first", "mine=first"),
        ("https://example.org/a", "https://example.org/a"),
        ("../elsewhere/out.json", "out.json"),
        ("benchmarks/results/ttft.json", "benchmarks/results/ttft.json"),
        ("org/model", "org/model"),
        ("--threads", "--threads"),
        ("2", "2"),
        ("-", "-"),
        ("", ""),
    ],
)
def test_a_path_of_this_machine_loses_its_directories(argument: str, shown: str) -> None:
    assert portable(argument) == shown


def test_the_environment_names_no_directory_of_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "kvquilt"), "bench", "ttft", "--model", str(tmp_path / "tiny"), "--rounds", "1", "a;b"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert environment()["command"] == "kvquilt bench ttft --model tiny --rounds 1 'a;b'"


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_dies_is_told_with_its_exit_code(code: int) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=os._exit, args=(code,))
    child.start()
    theirs.close()
    with pytest.raises(ModelError, match=f"exit code {code}"):
        bench._received(ours, child)


def test_a_process_that_answers_is_heard() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=time.sleep, args=(0,))
    child.start()
    theirs.send_bytes(b"1.5")
    assert bench._received(ours, child) == 1.5


def test_the_stock_model_stands_where_the_engine_runs(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    chatml_tokenizer().save_pretrained(tmp_path)
    settings = Settings(store_dir=tmp_path / "store", cache_dir=tmp_path / "cache")
    stock = bench._stock(TtftPlan(model=str(tmp_path)), settings, torch.device("meta"))
    assert {parameter.device.type for parameter in stock.parameters()} == {"meta"}
