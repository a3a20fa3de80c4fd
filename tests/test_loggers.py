"""The data that loggers receive besides metrics, and failures of loggers, which do not end the run."""

import functools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support import runs
from support.data import random_table
from support.networks import largest_difference, linear_model
from support.peers import as_processes
from support.runs import setup_of
from support.shared import sgd, shared

import jaxddp
from jaxddp.config import Config
from jaxddp.config.registry import check_read
from jaxddp.core.errors import InputError
from jaxddp.data.order import EvalOrder
from jaxddp.engine.predictions import make_predict
from jaxddp.training.evaluation import predicted
from jaxddp.training.events import RunStart
from jaxddp.training.listeners import trackers
from jaxddp.training.listeners.notifier import OptionalLogger, make_loggers

VAL = random_table(23, seed=1)
IMAGES_FAIL = "the predictions to show failed (bad.jpg: damaged) and are left out from here on"
PLAN = {"train": {"duration": "9 steps"}, "log": {"every": "3 steps"}}


class Recorder:
    def __init__(self, predictions: int = 0):
        self.wants_predictions = predictions
        self.evaluations: list[Any] = []

    def evaluation(self, record):
        if record.final:
            self.evaluations.append(record)


class Failing:
    """A logger that raises an error in one of its methods, and records the calls."""

    def __init__(self, moment: str, error: Exception):
        self.calls: list[str] = []
        for name in ("start", "step", "evaluation", "end"):
            setattr(self, name, lambda record, name=name: self._record(name, name == moment, error))

    def _record(self, moment: str, fails: bool, error: Exception) -> None:
        self.calls.append(moment)
        if fails:
            raise error


def train_with(*listeners: Any, val: Any = VAL, devices: int = 2, **more: Any) -> tuple[jaxddp.RunSetup, Any]:
    setup = setup_of(linear_model(), sgd(0.1), devices=devices, **more)
    return setup, runs.train(setup, PLAN, val=val, listeners=listeners)


@functools.cache
def undisturbed() -> tuple[Any, list[Any]]:
    """Return the parameters and the metrics of a run without a failing logger."""
    _, state = train_with(recorder := Recorder())
    return jax.device_get(state.params), [record.metrics for record in recorder.evaluations]


@pytest.mark.parametrize(
    ("moment", "step", "calls"),
    [
        ("start", 0, ["start", "end"]),
        ("step", 3, ["start", "step", "end"]),
        ("evaluation", 7, ["start", *["step"] * 3, "evaluation", "end"]),
        ("end", 9, ["start", *["step"] * 3, "evaluation", "step", "evaluation", "end"]),
    ],
)
def test_a_failing_logger_is_reported_once_and_does_not_change_the_run(moment, step, calls, caplog):
    logger, recorder = Failing(moment, RuntimeError("no\nanswer")), Recorder()
    _, state = train_with(OptionalLogger("mine", logger), recorder)
    messages = [record.getMessage() for record in caplog.records if record.name == "jaxddp.training"]
    assert messages == [f"the logger mine failed at step {step} (RuntimeError: no answer) and is left out from here on"]
    params, metrics = undisturbed()
    assert logger.calls == calls and largest_difference(state.params, params) == 0
    assert [record.metrics for record in recorder.evaluations] == metrics


@pytest.mark.parametrize("optional", [True, False])
def test_ctrl_c_in_a_logger_and_an_error_of_the_users_listener_end_the_run(optional):
    failing = Failing("step", KeyboardInterrupt() if optional else RuntimeError("mine"))
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        train_with(OptionalLogger("mine", failing) if optional else failing)


def test_settings_of_a_logger_that_the_run_does_not_use_are_rejected():
    for key, value in {"project": "flowers", "name": "first", "config": ["fold=3"]}.items():
        config = Config().replace(log={key: value, "to": ["jsonl", "tensorboard"]})
        with pytest.raises(InputError, match=rf"^log.{key}=.* has no effect without wandb or mlflow in log.to; leave"):
            check_read(config)
    with pytest.raises(InputError, match="^log.to=curves: curves are drawn from metrics.jsonl; name .jsonl. too$"):
        Config().replace(log={"to": ["curves"]})


@pytest.mark.ci
def test_from_python_loggers_need_a_work_directory(tmp_path):
    setup = shared(jaxddp.prepare_training(linear_model(), random_table(20), 1, sgd(0.1), 4))
    for log_to, workdir, message in (
        ("curves", None, "log_to='curves': .* written into the work directory; give workdir too"),
        (["curvs"], tmp_path, "log.to='curvs' is unknown; did you mean 'curves'"),
        (5, tmp_path, "log_to=5: expected a list of texts"),
    ):
        with pytest.raises(InputError, match=message):
            jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), log_to=log_to, workdir=workdir)
    jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), log_to="curves,parameters", workdir=tmp_path)
    assert {"curves.png", "parameters.txt", "metrics.jsonl"} <= {path.name for path in tmp_path.iterdir()}


def test_all_loggers_of_a_config_except_jsonl_are_optional(tmp_path, monkeypatch):
    loggers = make_loggers(Config().replace(log={"to": ("jsonl", "curves", "tensorboard"), "images": 5}), tmp_path)
    assert [type(logger).__name__ for logger in loggers] == ["JsonLines", "OptionalLogger", "OptionalLogger"]
    assert [logger.wants_predictions for logger in loggers] == [0, 0, 5]
    monkeypatch.setattr("importlib.util.find_spec", lambda library: None)
    missing = "^log.to=wandb: the package wandb is not installed; pip install 'jaxddp\\[wandb\\]'$"
    with pytest.raises(InputError, match=missing):
        make_loggers(Config().replace(log={"to": ("wandb",)}), tmp_path)


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_all_evaluations_have_predictions_of_the_same_images(devices):
    three, eleven = Recorder(3), Recorder(11)
    setup, state = train_with(three, eleven, devices=devices)
    records = eleven.evaluations
    assert [record.step for record in records] == [7, 9]
    shown = VAL.take(11)
    for record in records:
        np.testing.assert_array_equal(record.predictions.images, shown.images)
        np.testing.assert_array_equal(record.predictions.labels, shown.labels)
        assert tuple(record.predictions.class_names) == VAL.class_names
    # All listeners receive the same record.
    assert [record.predictions for record in three.evaluations] == [record.predictions for record in records]
    order, data = EvalOrder(len(shown), 16), setup.config.data.of_evaluation
    batch = setup.topology.place(next(shown.eval_batches(order, data)))
    logits = make_predict(setup.measured, setup.topology)(state, batch)
    expected = np.asarray(jax.nn.softmax(logits))[:11]
    np.testing.assert_array_equal(records[-1].predictions.predicted, expected.argmax(-1))
    np.testing.assert_allclose(records[-1].predictions.probabilities, expected.max(-1), rtol=1e-6)
    assert (records[0].predictions.probabilities != records[1].predictions.probabilities).all()


def git(folder: Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", "-C", folder, *identity, *command], check=True, capture_output=True, text=True).stdout


def test_the_code_version_is_the_commit_and_whether_its_files_differ(tmp_path, monkeypatch):
    assert trackers.code_version(tmp_path) == {}
    git(tmp_path, "init", "-q")
    assert trackers.code_version(tmp_path) == {}
    (tmp_path / "recipe.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "notes.txt").write_text("untracked")
    assert trackers.code_version(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "recipe.py").write_text("a = 2\n")
    assert trackers.code_version(tmp_path) == {"commit": commit, "dirty": True}


def test_a_run_gives_its_loggers_the_content_of_config_json(tmp_path):
    started: list[RunStart] = []
    setup = shared(jaxddp.prepare_training(linear_model(), random_table(20), 1, sgd(0.1), 4))
    for options in ({"workdir": tmp_path / "own"}, {}):
        listener = SimpleNamespace(start=started.append)
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=[listener], **options)
    assert started[0].config == json.loads((tmp_path / "own" / "config.json").read_text())
    assert started[1].config["train"]["batch_size"] == 4
    params = {"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}
    config = {"seed": 3, "recipe": {"file": "a.py", "digest": "d"}}
    provenance = trackers.provenance(RunStart(0, 10, 8, 100, 4, 2, params=params, config=config))
    expected = {"seed": 3, "recipe.file": "a.py", "recipe.digest": "d", "versions.jax": jax.__version__}
    assert (expected | {"run.devices": 4, "run.parameters": 16}).items() <= provenance.items()


def test_an_id_is_kept_for_a_run_that_resumes(tmp_path):
    path, fresh, resumed = tmp_path / "wandb.json", RunStart(0, 9, 8, 9, 1, 1), RunStart(3, 9, 8, 9, 1, 1)
    assert trackers.saved_id(path, resumed) is None
    path.write_text('{"id": "abc"}')
    assert (trackers.saved_id(path, fresh), trackers.saved_id(path, resumed)) == (None, "abc")
    path.write_text("[]")
    with pytest.raises(InputError, match="wandb.json: holds no id of a run; remove it to log to a new run"):
        trackers.saved_id(path, resumed)


def test_if_one_process_cannot_read_the_images_to_show_no_process_computes_their_predictions(caplog):
    computed: list[int] = []

    class Predictor:
        def __init__(self, peers: Any):
            self._process, self.topology = peers.process_index, SimpleNamespace(peers=peers)

        @property
        def batches(self) -> None:
            if self._process == 1:
                raise InputError("bad.jpg: damaged")

        def __call__(self, state: None) -> None:
            computed.append(self._process)

    def predictions(peers) -> list:
        predictor: Any = Predictor(peers)
        return [predicted(predictor, predictor)]

    assert as_processes(2, predictions) == [[None]] * 2 and not computed
    assert [record.getMessage() for record in caplog.records] == [IMAGES_FAIL] * 2
