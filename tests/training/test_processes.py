"""Two processes take the step that one would take."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.training.world import World
from tests.training.runs import logged, trainer, values, without

CONFIG = without(epochs=1, batch=2, validate_every=3)
RUN = """
import sys, torch
from pathlib import Path
from tests.training.runs import exercises, trainer
from tests.training.test_processes import CONFIG
torch.set_num_threads(1)
seen = []
run = trainer(Path(sys.argv[1]), CONFIG, held_out=exercises(3, 9))
assert run.world.size == 2
run.train(seen.append)
assert bool(seen) == run.world.main
torch.distributed.destroy_process_group()
"""


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    from tests.training.runs import exercises

    one = trainer(tmp_path / "one", CONFIG, held_out=exercises(3, 9))
    alone = values(one.train())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "default", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    both = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path / "two")],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    from kvquilt.writers.artefact import load_writer

    together = load_writer(tmp_path / "two").named()
    assert together.keys() == alone.keys()
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=2e-5)
    lines, others = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert [line["step"] for line in others] == [line["step"] for line in lines]
    for line, other in zip(lines, others, strict=True):
        assert other.get("tokens") == line.get("tokens")
        assert other["validation"] == (line["validation"] and pytest.approx(line["validation"], rel=1e-3))


def test_a_step_needs_an_exercise_for_every_process(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="each of 3 processes"):
        trainer(tmp_path, CONFIG, world=World(size=3)).train()
    assert World(1, 3).share([0, 1, 2, 3, 4]) == [1, 4]


def test_a_number_of_processes_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE"):
        World.found()
