"""A history as a table, and read from a work directory."""

import json
import math
import sys

import numpy as np
import pytest
from support.data import random_table
from support.errors import error_line
from support.networks import linear_model
from support.shared import sgd

import jaxddp
from jaxddp import History


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def history(workdir) -> History:
    """Return the history of two epochs of 50 examples in batches of 8: 13 logged steps, two evaluations."""
    setup = jaxddp.prepare_training(linear_model(), random_table(50), 4, sgd(0.05), 2, epochs=2)
    odd = iter((math.inf, 0.5))
    _, history = jaxddp.train(
        *(jaxddp.softmax_cross_entropy, setup),
        val=random_table(23, seed=1),
        evaluators=[lambda state: {"odd": next(odd)}],
        workdir=workdir,
        listeners=(),
        log_every="1 step",
    )
    return history


@pytest.mark.slow
def test_a_table_has_all_rows_in_the_order_of_logging(history, workdir):
    frame = history.to_frame()
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert len(frame) == len(lines) == 15
    assert frame.columns[:3].tolist() == ["step", "epoch", "split"]
    assert set(frame.columns) == {name for line in lines for name in line}
    assert frame["step"].dtype == np.int64
    assert all(frame[name].dtype == np.float64 for name in frame if name not in ("step", "split"))
    assert frame["split"].tolist() == ["train"] * 7 + ["val"] + ["train"] * 6 + ["val"]
    for name in frame:
        for value, line in zip(frame[name], lines, strict=True):
            # JSON cannot represent numbers that are not finite.
            logged = line.get(name)
            assert value == logged or (logged is None and not math.isfinite(value))
    assert frame["odd"].iloc[7] == math.inf


@pytest.mark.parametrize("part", ["train", "epochs", "val"])
def test_the_table_of_a_part_of_the_history_has_the_columns_of_the_part(history, part):
    frame, columns = history.to_frame(part), getattr(history, part)
    assert list(frame) == list(columns) and len(frame) == {"train": 13, "epochs": 2, "val": 2}[part]
    for name, values in columns.items():
        np.testing.assert_array_equal(frame[name].to_numpy(), values)
        assert frame[name].dtype == values.dtype


def test_a_history_is_read_from_the_folder_of_a_run(history, workdir):
    for path in (workdir, str(workdir)):
        read = History.read(path)
        for part in ("train", "epochs", "val"):
            expected, columns = getattr(history, part), getattr(read, part)
            assert list(columns) == list(expected)
            for name in expected:
                np.testing.assert_array_equal(columns[name], np.where(np.isinf(expected[name]), np.nan, expected[name]))
        assert repr(read) == repr(history)
    assert read._repr_png_().startswith(b"\x89PNG")


def test_the_history_of_a_run_that_has_ended_or_continues_has_its_earlier_rows(history, workdir, tmp_path):
    def again(epochs: int, folder) -> History:
        setup = jaxddp.prepare_training(linear_model(), random_table(50), 4, sgd(0.05), 2, epochs=epochs)
        options = {"val": random_table(23, seed=1), "listeners": (), "log_every": "1 step", "workdir": folder}
        return jaxddp.train(jaxddp.softmax_cross_entropy, setup, **options)[1]

    again(1, tmp_path)
    (tmp_path / "checkpoints/validation.json").unlink()  # As if it had been killed before it saved the metrics.
    continued, ended = again(2, tmp_path), again(2, tmp_path)
    for one in (continued, ended):
        for name in ("loss", "top1"):
            assert np.array_equal(one.val[name], history.val[name])
            assert np.array_equal(one.train[name], history.train[name])


def test_an_unreadable_history_raises_a_one_line_error(history, workdir, tmp_path, monkeypatch):
    missing = "no such file; give the work directory of a run that was logged"
    assert error_line(History.read, tmp_path) == f"{tmp_path}/metrics.jsonl: {missing}"
    assert error_line(History.read, 5) == "workdir=5: expected a path"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert error_line(History.read, tmp_path).startswith(f"{tmp_path}/metrics.jsonl:1: not a JSON object with a step")
    assert error_line(history.to_frame, "test") == "part='test': expected 'train' or 'epochs' or 'val' or 'val_ema'"
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert error_line(history.to_frame) == "history.to_frame(): pandas is not installed; pip install 'jaxddp[pandas]'"
