"""A run that was stopped, by whatever, gives what an uninterrupted one gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquilt.errors import InputError, IntegrityError, StoreUnavailableError
from kvquilt.training.folder import RunFolder
from kvquilt.training.objective import Objective
from tests.training.runs import SMALL, StoppedError, exercises, logged, same, stop_after, trainer, values, without

STEPS = 6  # two epochs of five exercises, two at a time
WRITER = ("writer.json", "adapter_config.json", "adapter_model.safetensors", "soft_tokens.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, values(trainer(folder).train())


def check(folder: Path, made: dict[str, torch.Tensor], whole: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert same(made, whole[1])
    assert logged(folder) == logged(whole[0])
    assert [line["step"] for line in logged(folder)] == list(range(STEPS + 1))
    for name in WRITER:
        assert (folder / name).read_bytes() == (whole[0] / name).read_bytes()


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_stopped_after_any_step_goes_on_as_if_it_had_not_been(tmp_path: Path, whole, step: int) -> None:
    with pytest.raises(StoppedError):
        trainer(tmp_path).train(stop_after(step))
    check(tmp_path, values(trainer(tmp_path).train()), whole)


def test_a_run_stopped_again_and_again_is_the_same(tmp_path: Path, whole) -> None:
    for step in (1, 3, 4):
        with pytest.raises(StoppedError):
            trainer(tmp_path).train(stop_after(step))
    check(tmp_path, values(trainer(tmp_path).train()), whole)


def test_a_killed_process_leaves_a_state_to_go_on_from(tmp_path: Path, whole) -> None:
    """SIGKILL after step 5, whose line stands in the log; the state is that of step 4."""
    code = (
        "import os, signal, sys, torch; from pathlib import Path; from tests.training.runs import trainer\n"
        "torch.set_num_threads(1)\n"
        "def report(progress):\n    if progress.step == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "trainer(Path(sys.argv[1])).train(report)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in logged(tmp_path)] == [0, 1, 2, 3, 4, 5]
    check(tmp_path, values(trainer(tmp_path).train()), whole)


@pytest.mark.parametrize("broken", ["validation", "log", "publish"])
def test_a_run_that_stops_between_update_and_log_does_the_rest_again(
    tmp_path: Path, whole, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    from kvquilt.training.artefact import Artefact
    from kvquilt.training.validation import Validation

    owner, name = {
        "validation": (Validation, "of"), "log": (RunFolder, "note"), "publish": (Artefact, "publish"),
    }[broken]  # fmt: skip
    real, calls = getattr(owner, name), []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == (4 if broken == "log" else 2):  # of steps 3 and 2, after the start's
            raise StoppedError
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(StoppedError):
            trainer(tmp_path).train()
    check(tmp_path, values(trainer(tmp_path).train()), whole)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = without(epochs=1)
    first = values(trainer(tmp_path, config).train())
    state, steps = (tmp_path / "state.safetensors").read_bytes(), []
    again = values(trainer(tmp_path, config).train(steps.append))
    assert same(first, again)
    assert not steps
    assert (tmp_path / "state.safetensors").read_bytes() == state


def test_an_interruption_within_the_optimizer_leaves_the_state_before(
    tmp_path: Path, whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = torch.optim.AdamW.step, []

    def step(self):
        calls.append(1)
        if len(calls) == 4:
            next(iter(self.param_groups[0]["params"])).data.add_(1.0)  # half of an update
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path).train()
    check(tmp_path, values(trainer(tmp_path).train()), whole)


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        trainer(tmp_path, without()).train(stop_after(1))
    before = (tmp_path / "state.safetensors").read_bytes(), (tmp_path / "log.jsonl").read_bytes()
    other = without(shape=SMALL.shape.__class__(rank=4, header=2, trailer=1), objective=Objective(kl=2.0), seed=3)
    with pytest.raises(InputError) as refused:
        trainer(tmp_path, other, exercises=exercises(4)).train()
    for name in ("shape.rank", "objective.kl", "seed", "exercises", "start"):
        assert name in str(refused.value)
    assert "lr" not in str(refused.value)
    with pytest.raises(InputError, match="held-out exercises"):
        trainer(tmp_path, without(), held_out=exercises(1, 20)).train()
    assert before == ((tmp_path / "state.safetensors").read_bytes(), (tmp_path / "log.jsonl").read_bytes())


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "other"])
def test_a_damaged_state_is_named(tmp_path: Path, damage: str) -> None:
    with pytest.raises(StoppedError):
        trainer(tmp_path, without()).train(stop_after(1))
    path = tmp_path / "state.safetensors"
    raw = path.read_bytes()
    made = {"cut": raw[: len(raw) // 2], "text": b"no state", "empty": b"", "other": raw.replace(b'\\"due', b'\\"dew')}
    path.write_bytes(made[damage])
    with pytest.raises(IntegrityError, match="delete it to start from the beginning"):
        trainer(tmp_path, without()).train()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    refused = []

    def report(progress) -> None:
        with pytest.raises(InputError, match="another process") as error:
            trainer(tmp_path, without()).train()
        refused.append(error.value)
        raise StoppedError

    with pytest.raises(StoppedError):
        trainer(tmp_path, without()).train(report)
    assert refused
    trainer(tmp_path, without()).train()  # the lock is free again


def test_a_full_disk_leaves_the_state_that_was_there(tmp_path: Path, whole, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquilt.training import resume

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StoppedError):
        trainer(tmp_path).train(stop_after(2))
    before = (tmp_path / "state.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(resume, "write_atomically", full)
        with pytest.raises(StoreUnavailableError, match="No space left"):
            trainer(tmp_path).train()
    assert (tmp_path / "state.safetensors").read_bytes() == before
    check(tmp_path, values(trainer(tmp_path).train()), whole)


def test_a_full_disk_while_targets_are_kept_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquilt.training import targets

    def full(path: Path, data: bytes, *, private: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(targets, "write_atomically", full)
    with pytest.raises(StoreUnavailableError, match="No space left"):
        trainer(tmp_path, without()).train()
