"""Every listener and logger records the same scalars of a run. `KINDS` has an entry for each kind of listener.

The first tests send the events of an invented run (`support.listeners`). The others train, stop and resume a run with
all loggers that need a library. The features of a single logger have a separate test file.
"""

import dataclasses
import functools
import json
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.logged as logged
from support import runs
from support.data import random_table
from support.listeners import TOTAL, evaluation_record, run_start, step_record

from jaxddp.config import Config
from jaxddp.config.registry import LOGGERS
from jaxddp.core.errors import InputError
from jaxddp.training.events import RunEnd
from jaxddp.training.listeners import jsonl as rows
from jaxddp.training.listeners.jsonl import History
from jaxddp.training.listeners.notifier import OptionalLogger
from jaxddp.training.progress import LiveDisplay, PlainLines, TerminalScreen


def of_config(name: str, workdir: Path) -> Any:
    """Return the logger of a config without its `OptionalLogger`."""
    return LOGGERS.get(name)(Config().replace(log={"to": ("jsonl", name)}), workdir)


def plain_lines(workdir: Path) -> PlainLines:
    workdir.mkdir(exist_ok=True)
    return PlainLines((workdir / "screen.txt").open("a"))


def live_display(workdir: Path) -> LiveDisplay:
    workdir.mkdir(exist_ok=True)
    return LiveDisplay(TerminalScreen((workdir / "screen.txt").open("a")))


def of_history(workdir: Path) -> logged.Series:
    history = the_history(workdir)
    parts = {"train/": history.train, "train/epoch_": history.epochs, "val/": history.val}
    named = {f"{part}{name}": (columns["step"], columns[name]) for part, columns in parts.items() for name in columns}
    left_out = ("train/step", "val/step", "train/epoch_step", "train/epoch_epoch")
    return {name: [*zip(*columns, strict=True)] for name, columns in named.items() if name not in left_out}


def wandb_end(workdir: Path) -> tuple[int, bool]:
    """Return the exit code of the last run, and whether it was marked as preempted."""
    results = list(logged.wandb_records(logged.offline_runs(workdir)[-1]))
    (end,) = (record.exit for record in results if record.WhichOneof("record_type") == "exit")
    return end.exit_code, any(record.WhichOneof("record_type") == "preempting" for record in results)


the_history = functools.cache(lambda workdir: History())
"""A history exists only in memory; a notebook resumes with the same object."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of listener: what it writes (scalars, a file, or nothing), and how it reports an end."""

    make: Callable[[Path], Any]
    """Makes the listener for a work directory."""
    series: Callable[[Path], logged.Series] | None = None
    file: str = ""
    again: bool = False
    """Whether a step that a resumed run repeats has a second point or line."""
    end: Callable[[Path], Any] | None = None
    ends: tuple[Any, ...] = ()
    """The recorded ends of runs that are done, failed and preempted."""


KINDS = {
    "jsonl": Kind(
        *(functools.partial(of_config, "jsonl"), logged.of_jsonl),
        end=lambda workdir: json.loads((workdir / "result.json").read_text())["status"],
        ends=("done", "failed", "preempted"),
    ),
    "history": Kind(the_history, of_history),
    "plain lines": Kind(plain_lines, file="screen.txt", again=True),
    "live display": Kind(live_display, file="screen.txt", again=True),
    "curves": Kind(functools.partial(of_config, "curves"), file="curves.png"),
    "parameters": Kind(functools.partial(of_config, "parameters"), file="parameters.txt"),
    "confusion": Kind(functools.partial(of_config, "confusion"), file="confusion.csv"),
    "tensorboard": Kind(functools.partial(of_config, "tensorboard"), logged.of_tensorboard, again=True),
    "wandb": Kind(
        *(functools.partial(of_config, "wandb"), logged.of_wandb),
        again=True,
        end=wandb_end,
        ends=((0, False), (1, False), (75, True)),
    ),
    "mlflow": Kind(
        *(functools.partial(of_config, "mlflow"), logged.of_mlflow),
        again=True,
        end=lambda workdir: logged.mlflow_run(workdir).info.status,
        ends=("FINISHED", "FAILED", "KILLED"),
    ),
}
OF_NUMBERS = [name for name, kind in KINDS.items() if kind.series]
OF_FILES = [name for name, kind in KINDS.items() if kind.file]
WRITERS = [name for name in (*OF_NUMBERS, *OF_FILES) if name in LOGGERS.names()]
assert set(LOGGERS.names()) <= KINDS.keys(), "every logger of a config is tested here"


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory) -> Iterator[Path]:
    """The current directory of these tests, in which MLflow makes its store."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        logged.alone(folder, patch)
        yield folder
        logged.remove_mlflow_variables()


CONFUSED = {"confusion": np.array([[3, 1], [0, 4]])}
PARAMS = {"kernel": np.zeros((3, 2))}


def record_run(
    listener: Any, start: int = 0, stop: int = TOTAL, status: str = "done", evaluate: tuple[int, ...] = (4, 10)
):
    """Call listeners for the steps after `start` up to `stop`, where the run ends with a status."""
    listener.start(run_start(start, params=PARAMS, class_names=("a", "b")))
    for step in range(start + 1, stop + 1):
        listener.step(step_record(step))
        for seen in (32, 77) if step in evaluate else ():
            listener.evaluation(evaluation_record(step, seen, sets=CONFUSED))
    listener.end(RunEnd(status, stop, 90.0, {"loss": math.e / 10}))


def course(stop: int = TOTAL, evaluate: tuple[int, ...] = (4, 10)) -> logged.Series:
    """Return the scalars of the invented run, by their names in loggers."""
    results = []
    for step in range(1, stop + 1):
        results.append(rows.step_row(step_record(step)))
        results += [rows.evaluation_row(evaluation_record(step))] if step in evaluate else []
    return logged.of_rows(results)


def differing(results: logged.Series, expected: logged.Series, *, again: bool = False) -> list[str]:
    """Return the names of the scalars that differ. Values are compared in float32, which TensorBoard stores.

    A scalar that only one side has differs. Points that occur twice differ, unless `again`; then the last one counts.
    """

    def is_equal(name: str) -> bool:
        if name not in results or name not in expected:
            return False
        points = dict(results[name])
        is_once = again or len(points) == len(results[name])
        return is_once and points == pytest.approx(dict(expected[name]), rel=1e-6, nan_ok=True)

    return sorted(name for name in results.keys() | expected.keys() if not is_equal(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_every_listener_records_the_scalars_of_a_run(name: str, tmp_path: Path) -> None:
    record_run(KINDS[name].make(tmp_path))
    results = KINDS[name].series(tmp_path)
    assert differing(results, course()) == []
    assert results["train/loss"] == [(step, pytest.approx(math.pi / step, rel=1e-6)) for step in range(1, 11)]
    assert results["train/epoch_top1"] == [(step, pytest.approx(step / 11, rel=1e-6)) for step in (4, 7, 10)]
    assert results["val/count"] == [(4, 77.0), (10, 77.0)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_resumed_run_continues_its_record_and_a_new_run_begins_another(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    record_run(kind.make(tmp_path), stop=6, status="preempted")
    record_run(kind.make(tmp_path), start=5)
    assert differing(kind.series(tmp_path), course(), again=kind.again) == []
    record_run(kind.make(tmp_path), stop=2, status="failed", evaluate=())
    assert differing(kind.series(tmp_path), course(stop=2, evaluate=())) == []


# tests/test_curves.py checks the picture of a resumed run, which takes long to draw.
@pytest.mark.parametrize("name", [name for name in OF_FILES if not KINDS[name].again and name != "curves"])
def test_a_resumed_run_writes_the_file_of_an_uninterrupted_run_and_a_new_run_replaces_it(
    name: str, tmp_path: Path
) -> None:
    kind, resumed, whole = KINDS[name], tmp_path / "resumed", tmp_path / "whole"
    # The second epoch ends with step 7, which the resumed run repeats.
    record_run(kind.make(resumed), stop=8, status="preempted")
    record_run(kind.make(resumed), start=5)
    record_run(kind.make(whole))
    assert (resumed / kind.file).read_bytes() == (whole / kind.file).read_bytes()
    for folder in (resumed, tmp_path / "fresh"):
        record_run(kind.make(folder), stop=5)
    assert (resumed / kind.file).read_bytes() == (tmp_path / "fresh" / kind.file).read_bytes()


def is_number(value: float) -> bool:
    """Return whether a recorded value is finite. MLflow's store records infinity as the largest number."""
    return math.isfinite(value) and abs(value) < sys.float_info.max


@pytest.mark.parametrize("name", KINDS)
def test_values_that_are_not_finite_are_recorded_without_a_failure(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    for each in (KINDS["jsonl"], kind):
        listener = each.make(tmp_path)
        listener.start(run_start(params=PARAMS, class_names=("a", "b")))
        listener.step(step_record(1))
        listener.step(step_record(2, metrics={"loss": math.nan, "top1": -math.inf}))
        listener.evaluation(evaluation_record(2, metrics={"loss": math.inf, "top1": 0.5}, sets=CONFUSED))
        listener.end(RunEnd("failed", 2, 1.0, {"loss": math.inf, "top1": 0.5}, reason="the loss is nan"))
    if kind.file:
        assert (tmp_path / kind.file).stat().st_size > 0
    if kind.series:
        results = kind.series(tmp_path)
        assert [step for step, _ in results["train/loss"]] == [1, 2]
        assert [is_number(value) for _, value in results["train/loss"]] == [True, False]
        assert results["val/top1"] == [(2, 0.5)]
        assert [(step, is_number(value)) for step, value in results["val/loss"]] == [(2, False)]


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_cannot_be_written_disables_a_logger_and_does_not_end_the_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    caplog.set_level(logging.WARNING, "jaxddp.training")
    logger = KINDS[name].make(tmp_path / "file" / "run")
    if name == "jsonl":
        with pytest.raises(InputError, match="file/run: cannot be written"):
            record_run(logger)
        return
    record_run(OptionalLogger(name, logger))
    (message,) = [record.getMessage() for record in caplog.records if record.name == "jaxddp.training"]
    assert message.startswith(f"the logger {name} failed at step ") and message.endswith(
        " and is left out from here on"
    )
    assert "file/run" in message


TRAIN, VAL = random_table(24), random_table(9, seed=1)
WITH_LIBRARY = ["tensorboard", "wandb", "mlflow"]


@pytest.fixture(scope="module")
def resumed(store: Path) -> Path:
    hooks = sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM)
    runs.logged_in_two_parts(store / "runs" / "first", TRAIN, VAL, WITH_LIBRARY)
    assert (sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM)) == hooks
    return store / "runs" / "first"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_LIBRARY)
def test_every_logger_has_the_metrics_of_metrics_jsonl(name: str, resumed: Path) -> None:
    expected = logged.of_jsonl(resumed)
    assert [step for step, _ in expected["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in expected["val/top1"]] == [3, 6]
    assert differing(KINDS[name].series(resumed), expected) == []


@pytest.mark.slow
def test_wandb_continues_the_same_run_with_the_config_and_the_versions_of_the_code(resumed: Path) -> None:
    first, second = logged.offline_runs(resumed)
    assert (
        logged.wandb_ids(first) == logged.wandb_ids(second) == {json.loads((resumed / "wandb.json").read_text())["id"]}
    )
    assert [row["step"] for row in logged.wandb_history(second)] == [4, 5, 6, 6]
    names = {(record.run.project, record.run.display_name) for record in logged.wandb_records(first)} - {("", "")}
    assert names == {("jaxddp", "first")}
    content, before, after = (
        json.loads((resumed / "config.json").read_text()),
        *map(logged.wandb_config, (first, second)),
    )
    assert (before["train.duration"], after["train.duration"]) == ("1 epoch", "2 epochs")
    assert after["fingerprint.train"] == content["fingerprint"]["train"]
    assert (after["run.devices"], after["run.parameters"]) == (2, 6 * 6 * 3 * 5)
    assert {"versions.jax", "versions.jaxddp", "seed"} <= after.keys()


def test_mlflow_has_one_run_with_the_config_and_tags_of_changed_settings(resumed: Path) -> None:
    content, run = json.loads((resumed / "config.json").read_text()), logged.mlflow_run(resumed)
    experiment = logged.mlflow_client().get_experiment_by_name("jaxddp").experiment_id
    named = logged.mlflow_client().search_runs([experiment], "attributes.run_name = 'first'")
    assert [each.info.run_id for each in named] == [run.info.run_id]
    params, tags = run.data.params, run.data.tags
    assert params["fingerprint.train"] == content["fingerprint"]["train"]
    assert {"versions.jax", "versions.jaxddp", "seed", "objects.model"} <= params.keys()
    assert (params["train.duration"], tags["train.duration"]) == ("1 epoch", "2 epochs")
    assert params.keys() & tags.keys() == {"train.duration", "run.steps"}
