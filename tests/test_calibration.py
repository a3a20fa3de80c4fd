"""Temperatures, calibration errors and conformal sets: their mathematics, and the commands that apply them to a run."""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_recipe import SmallNet
from support.data import random_table
from support.networks import linear_model
from support.runs import LEAN, SMALL, fails
from support.trained import random_run

import jaxddp
from jaxddp.calibration import fitted_temperature, log_probabilities, negative_log_likelihood, set_threshold
from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.inference.output_files import write_out_of_fold
from jaxddp.inference.predictions import Outcome
from jaxddp.inference.trained import Ensemble
from jaxddp.reports.classes import reliability_charts

VAL = "ILSVRC/Data/CLS-LOC/val"
"""The folder of the validation images of the digits."""


@given(st.integers(0, 99), st.floats(0.05, 20))
def test_a_temperature_is_recovered_raises_no_loss_and_changes_no_class(seed, temperature):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(2000, 5))
    # The largest sum of a logit and Gumbel noise is a class drawn from their softmax.
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    assert fitted_temperature(logits, labels) == pytest.approx(1, abs=0.15)
    scaled = np.float32(temperature * logits)
    found = fitted_temperature(scaled, labels)
    assert found == pytest.approx(temperature * fitted_temperature(logits, labels), rel=1e-5)
    after = negative_log_likelihood(scaled, labels, found)
    assert after <= min(negative_log_likelihood(scaled, labels, found * factor) for factor in (1 / found, 0.99, 1.01))
    assert np.array_equal(log_probabilities(scaled, found).argmax(1), scaled.argmax(1))


def test_a_temperature_and_a_likelihood_equal_those_of_hand():
    """Of two classes with a difference of 2 of their logits, the first is right in 3 of 4 images: 2 / T = log 3."""
    logits, labels = np.array([[700.0, 698.0]] * 4), np.array([0, 0, 1, 0])
    assert fitted_temperature(logits, labels) == pytest.approx(2 / np.log(3))
    likelihood = -(3 * np.log(3 / 4) + np.log(1 / 4)) / 4
    assert negative_log_likelihood(logits, labels, 2 / np.log(3)) == pytest.approx(likelihood)


@pytest.mark.parametrize(("label", "fault"), [(0, "all classified right"), (1, "classified no better than by chance")])
def test_a_temperature_without_a_best_value_is_an_error(label, fault):
    with pytest.raises(InputError, match=f"no temperature fits: the 2 images are {fault}; calibrate on other data"):
        fitted_temperature(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, label]))


def test_the_reliability_of_predictions_equals_that_of_hand():
    """Two bins hold two images each: 1 of 2 right at 60.5%, and 2 of 2 right at 90%."""
    logits = np.log([[share, 1 - share] for share in (0.605, 0.605, 0.9, 0.9, np.nan)])
    raw = Outcome(np.array([0, 1, 0, 0, 0]), logits, ("a", "b"), 1)
    bins = raw.reliability
    assert np.flatnonzero(bins.counts).tolist() == [9, 13] and len(bins.counts) == 15
    assert bins.counts[[9, 13]].tolist() == [2, 2] and bins.right[[9, 13]].tolist() == [1, 2]
    assert bins.error == pytest.approx((0.105 + 0.1) / 2)
    (chart,) = reliability_charts(3, raw)
    accuracy, images = chart.data
    assert accuracy["x"] == pytest.approx([9.5 / 15, 13.5 / 15]) and accuracy["y"] == [0.5, 1.0]
    assert (images["y"], images["text"]) == ([2, 2], ["2", "2"])
    assert chart.title == "expected calibration error 10.25% before calibration"
    before, after = reliability_charts(3, replace(raw, temperature=2.0))
    assert before == chart and after.data != chart.data and after.title.endswith("% with temperature 2")


@given(st.integers(2, 70), st.integers(1, 99))
def test_of_exchangeable_images_exactly_the_promised_number_is_in_its_set(count, percent):
    """Each of n + 1 images is left out once, and its set comes from the n others."""
    values, covered = np.random.default_rng(count).permutation(count) / count, -(-count * percent // 100)
    if covered == count:
        needed = -(-percent // (100 - percent))
        with pytest.raises(InputError, match=f"needs {needed} labelled validation images?, and there are {count - 1};"):
            set_threshold(values[1:], percent / 100)
    else:
        assert sum(values >= [set_threshold(np.delete(values, row), percent / 100) for row in range(count)]) == covered


def test_a_temperature_divides_the_logits_of_all_outputs_of_a_network():
    run, table = random_run(SmallNet(width=3), 8, eval={"views": "mirror"}), random_table(20, image=8)
    warm, expected = replace(run, temperature=3.0), np.exp(log_probabilities(run.logits(table), 3.0))
    assert not np.allclose(run.outcome(table).probabilities, expected, atol=1e-3)
    (explained,) = warm.explained_stream(table)
    for probabilities in (warm.predict(table).probabilities, explained.values[0], warm.outcome(table).probabilities):
        assert np.allclose(probabilities, expected, atol=1e-6)
    assert warm.label_probabilities(table) == pytest.approx(expected[np.arange(20), table.labels], abs=1e-6)
    infinite = run.state.replace(params=jax.tree.map(lambda leaf: leaf * np.inf, run.state.params))
    assert warm.identity != run.identity and np.isnan(replace(run, state=infinite).logits(table)).all()
    of_mean = Ensemble.of([run, warm])
    assert np.allclose(of_mean.outcome(table).probabilities, of_mean.predict(table).probabilities, atol=1e-6)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return jaxddp.write_sample("digits", tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory) -> Iterator[Path]:
    """Return a run on the digits whose best checkpoint, of step 30, is not its latest, of step 60."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    words = ["train", "digits", *SMALL, *LEAN, "--data.path", str(digits), "--workdir", str(folder)]
    words += ["--train.duration", "60 steps", "--eval.every", "30 steps", "--checkpoint.every", "30 steps"]
    words += ["--checkpoint.best", "val loss", "--checkpoint.best-is", "max", "--optimizer.learning-rate", "0.03"]
    # Softmax regression learns the digits in a few steps. The tests open the run again, so the replacement stays.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxddp.models.resnet.build", lambda settings, classes, *_: linear_model(classes))
        assert main(words) == 0
        yield folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def predicted(run: Path, digits: Path, capfd, *options: str) -> tuple[list[dict[str, str]], str]:
    """Return the rows that `jaxddp predict` writes for the validation images, and its line."""
    out = run.parent / "out.csv"
    capfd.readouterr()
    assert main(["predict", str(run), *options, str(digits / VAL), "--out", str(out), "--top", "10"]) == 0
    return [*csv.DictReader(out.open())], capfd.readouterr().out.removeprefix(f"{out}: 300 images, ")


@pytest.mark.slow
def test_the_predictions_of_a_calibrated_checkpoint_are_those_that_were_promised(run, digits, tmp_path, capfd):
    listed = csv.DictReader((digits / "LOC_val_solution.csv").open())
    labels = [line["PredictionString"].split()[0] for line in sorted(listed, key=lambda line: line["ImageId"])]
    raw, line = predicted(run, digits, capfd)
    assert line == f"step 30 of {run}\n"
    assert main(["eval", str(run), "--calibrate", "--metrics", "top1,ece"]) == 0
    *_, shown, calibrated = capfd.readouterr().out.splitlines()
    found = json.loads((run / "calibration.json").read_text())
    pattern = r".*/run: temperature (.*) of step 30 from 300 images: negative log likelihood (.*) -> (.*), .* -> (.*)"
    temperature, before, after, error = map(float, re.fullmatch(pattern, calibrated).groups())
    assert temperature == pytest.approx(found["temperature"], abs=1e-4) and after < before
    hits = np.mean([row["class"] == label for row, label in zip(raw, labels, strict=True)])
    assert f"loss {before:.4f} top-1 {hits:.2%} ece {found['ece'][0]:.4f}" in shown
    assert found["ece"][1] == pytest.approx(error, abs=1e-4)
    rows, line = predicted(run, digits, capfd, "--coverage", "0.9")
    start = f"step 30 of {run}, calibrated with temperature {found['temperature']:.4g}, sets of classes with"
    assert [row["class"] for row in rows] == [row["class"] for row in raw]
    for each, likelihood in zip((raw, rows), found["nll"], strict=True):
        cells = [[*row.values()] for row in each]
        by_class = [dict(zip(row[1:21:2], row[2:21:2], strict=True)) for row in cells]
        shares = np.array([float(of_row[label]) for of_row, label in zip(by_class, labels, strict=True)])
        assert -np.log(shares).mean() == pytest.approx(likelihood, rel=1e-5)
    # 271 = ceil(301 * 0.9), so at least as many of the 300 sets have the label.
    least = np.sort(shares)[300 - 271]
    sets = [row["set"].split(";") for row in rows]
    assert sum(map(list.__contains__, sets, labels)) == (shares >= least).sum() >= 271 > (shares > least).sum()
    assert line == f"{start} a probability of at least {least:.4g}\n"
    assert all(row["set"].startswith(row["class"]) for row in rows if row["set"])
    assert predicted(run, digits, capfd, "--raw")[0] == raw
    assert jaxddp.load_run(run).temperature == found["temperature"]
    assert "calibrated" not in predicted(run, digits, capfd, str(run))[1]
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    for error, state in zip(found["ece"], ("before calibration", f"with temperature {temperature:.4g}"), strict=True):
        assert f"expected calibration error {error:.2%} {state}" in page


@pytest.mark.ci
def test_a_temperature_belongs_to_one_checkpoint_and_its_views(run, digits, capfd, caplog):
    views, latest, file = ("--eval.views", "mirror"), ("--step", "60"), run / "calibration.json"
    assert main(["eval", str(run), "--calibrate", "--step", "latest", *views]) == 0
    found = json.loads(file.read_text())
    assert f"loss {found['nll'][0]:.4f} top-1" in capfd.readouterr().out
    assert "calibrated" not in predicted(run, digits, capfd, *views)[1] + predicted(run, digits, capfd, *latest)[1]
    assert f"{file}: belongs to another checkpoint (step 60), so step 30 is not calibrated; run jaxddp" in caplog.text
    assert f"{file}: belongs to eval.views=mirror, so step 60 is not calibrated; run jaxddp" in caplog.text
    assert "calibrated" in predicted(run, digits, capfd, *latest, *views)[1]
    write_out_of_fold([run], run / "o.csv")
    assert ",class_10,probability_10,error,label,fold\n" in (run / "o.csv").read_text()
    file.write_text(json.dumps(found | {"checkpoint": "0" * 64}))
    assert "calibrated" not in predicted(run, digits, capfd, *latest, *views)[1]
    for content in ("{", "{}", json.dumps(found | {"temperature": 0})):
        file.write_text(content)
        line = fails(["predict", str(run), str(digits), "--out", "a.csv"], capfd)
        assert line.startswith(f"jaxddp: {file}: is damaged (") and line.endswith("; remove it, and calibrate again")


ONE_RUN = "--coverage: needs one run, whose validation data decide about the sets; leave it out"
SEVERAL = "{several}: its images have several labels, and --calibrate, --coverage and statistics of"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("predict {run} {val} --coverage 1", "--coverage 1.0: expected above 0, below 1"),
        ("predict {run} {val} --coverage 0.999", "--coverage 0.999: needs 999 labelled validation images, and there a"),
        ("predict {run} {run} {val} --coverage 0.9", ONE_RUN),
        ("predict {weights} {val} --coverage 0.9", ONE_RUN),
        ("predict {run} {val} --coverage 0.9 --format kaggle", "--format kaggle: --min-confidence and --coverage do"),
        ("predict {several} {val} --coverage 0.9", SEVERAL),
        ("eval {several} --calibrate", SEVERAL),
        ("eval {weights} --calibrate", "--calibrate: needs a checkpoint of a run, and here are only weights; leave it"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(run, digits, words, line, tmp_path, capfd):
    several, out = Path(shutil.copytree(run, tmp_path / "several")), tmp_path / "a.csv"
    signature = json.loads((several / "signature.json").read_text()) | {"label_form": "several labels"}
    (several / "signature.json").write_text(json.dumps(signature))
    places = {"run": run, "val": digits / VAL, "several": several, "weights": "timm/resnet18.a1_in1k"}
    given = [*words.format(**places).split(), *(["--out", str(out)] if "predict" in words else [])]
    assert fails(given, capfd).startswith("jaxddp: " + line.format(**places))
    assert not out.exists() and not (several / "calibration.json").exists()
