"""The learning-rate range test: its rates, its suggestion, and its only file, the picture."""

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data import random_table, write_arrays
from support.recipes import DENSE

from jaxddp.cli import main
from jaxddp.commands.find_lr import words_to_train
from jaxddp.rate_range import RateRange, RateTest

HOOK = """
def get_optimizer(config, learning_rate):
    return optax.sgd(learning_rate)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("find_lr")
    write_arrays(folder / "set.npz", random_table(200), random_table(9, seed=1))
    (folder / "recipe.py").write_text(DENSE)
    (folder / "hook.py").write_text(DENSE + HOOK)
    return folder


def run_find_lr(folder, monkeypatch, capfd, recipe: str, *words: str) -> tuple[int, str, str]:
    monkeypatch.chdir(folder)
    return main(["find-lr", recipe, "--data.path", "set.npz", *words]), *capfd.readouterr()


def rate_test(losses, lowest=1e-4, highest=1.0, steps=None, finite=True) -> RateTest:
    return RateTest(RateRange(lowest, highest, steps or len(losses)), list(losses), finite)


@given(st.floats(1e-9, 1), st.floats(2, 1e6), st.integers(2, 500))
def test_rates_rise_by_equal_factors_from_the_lowest_to_the_highest(lowest, times, steps):
    rates = np.array([float(RateRange(lowest, lowest * times, steps).schedule(step)) for step in (0, 1, steps - 1)])
    expected = lowest * times ** (np.array([0, 1, steps - 1]) / (steps - 1))
    np.testing.assert_allclose(rates, expected, rtol=1e-4)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60), st.integers(10, 400))
def test_the_smoothed_loss_is_a_mean_with_weights_that_add_up_to_one(losses, steps):
    test = rate_test(losses, steps=steps)
    smoothed, keep = test.smoothed, 1 - 1 / max(1, round(steps / 20))
    for count in range(1, len(losses) + 1):
        weights = keep ** np.arange(count)[::-1]
        assert smoothed[count - 1] == pytest.approx((weights * losses[:count]).sum() / weights.sum())


def descent(start: int, stop: int, steps: int = 100) -> np.ndarray:
    """Return losses that fall from 2 to 1 between two steps."""
    return np.interp(np.arange(steps), [start, stop], [2.0, 1.0])


def test_the_rate_of_the_steepest_descent_is_suggested():
    test = rate_test(descent(50, 60))
    rate, steepest, diverged = test.suggestion()
    assert rate == steepest and diverged is None and test.diverged_at is None
    # The smoothed loss falls a little later. A fall after a rise is ignored.
    assert float(test.rates.schedule(50)) <= rate <= float(test.rates.schedule(53))
    spiked = descent(50, 60)
    spiked[75:80] = 3.5
    assert rate_test(spiked).suggestion() == test.suggestion()
    # A loss that becomes negative, as that of SimSiam.
    assert rate_test(descent(50, 60) - 2).suggestion() == test.suggestion()


def test_the_suggestion_is_at_most_a_tenth_of_the_diverging_rate():
    losses = np.append(descent(80, 90, 91), [50.0])
    test = rate_test(losses, steps=100)
    rate, steepest, diverged = test.suggestion()
    assert test.diverged_at == 91 and diverged == pytest.approx(float(test.rates.schedule(91)))
    assert rate == diverged / 10 < steepest
    # A step that was dispatched before the loss diverged may have a small loss.
    assert rate_test(np.append(losses, [2.0]), steps=100).suggestion() == test.suggestion()
    not_finite = rate_test(losses[:-1], steps=100, finite=False)
    assert not_finite.diverged_at is None
    assert not_finite.suggestion()[2] == pytest.approx(float(test.rates.schedule(91)))


@pytest.mark.parametrize("losses", [[], [2.0], np.full(50, 2.0), np.linspace(2, 3, 50)])
def test_without_a_falling_loss_no_rate_is_suggested(losses):
    assert rate_test(losses, steps=50).suggestion()[:2] == (None, None)


def test_the_suggested_command_repeats_the_users_options():
    words = ["digits", "--steps", "50", "--seed", "1", "--optimizer.learning_rate=3", "--out", "x.png", "--lowest=1"]
    assert words_to_train(words) == ["digits", "--seed", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "devices"), [("recipe.py", "1"), ("hook.py", "4")])
def test_a_range_test_of_a_recipe_writes_only_the_picture(folder, monkeypatch, capfd, recipe, devices):
    """The warm-up of both recipes is longer than the range test, and hook.py has its own optimizer."""
    before = set(os.listdir(folder)) - {"__pycache__"}
    words = ("--parallel.devices", devices, "--steps", "40", "--out", f"{recipe}.png")
    code, out, err = run_find_lr(folder, monkeypatch, capfd, recipe, *words)
    assert code == 0, err
    assert set(os.listdir(folder)) - before - {"__pycache__"} == {f"{recipe}.png"}
    assert (folder / f"{recipe}.png").read_bytes().startswith(b"\x89PNG")
    *_, summary, command = out.splitlines()
    assert summary.startswith("the loss falls fastest at ") and "; suggested: " in summary
    suggested = shlex.split(command)
    expected = ["jaxddp", "train", recipe, "--data.path", "set.npz", "--parallel.devices", devices]
    assert suggested[:-1] == [*expected, "--optimizer.learning-rate"]
    assert 1e-6 <= float(suggested[-1]) == float(summary.split()[-1]) <= 10


@pytest.mark.slow
def test_with_a_reference_batch_size_the_suggested_rate_is_for_that_size(folder, monkeypatch, capfd):
    words = ("--steps", "20", "--out", "r.png", "--optimizer.reference-batch", "80", "--highest", "1")
    code, out, _ = run_find_lr(folder, monkeypatch, capfd, "recipe.py", *words)
    *_, summary, command = out.splitlines()
    assert code == 0 and float(command.split()[-1]) == pytest.approx(10 * float(summary.split()[-1]), rel=0.1)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_range_test_with_the_results_so_far(folder, monkeypatch, capfd):
    words = ("--steps", "20", "--out", "n.png", "--highest", "1e6", "--lowest", "1e-3", "--optimizer.momentum", "0.99")
    code, out, _ = run_find_lr(folder, monkeypatch, capfd, "recipe.py", *words)
    steps = int(out.splitlines()[0].split()[0])
    assert code == 0 and steps < 20 and (folder / "n.png").exists() and "diverges at" in out
    # The loss is NaN for the batches of training only.
    loss = "lambda logits, labels: logits.sum(-1) * (float('nan') if len(logits) > 15 else 1)"
    (folder / "bad.py").write_text(f"{DENSE}\n\ndef get_loss(config):\n    return {loss}\n")
    code, _, err = run_find_lr(folder, monkeypatch, capfd, "bad.py", "--out", "bad.png", "--train.batch-size", "160")
    assert code == 1 and "jaxddp: the loss of the first step is not finite; check the " in err.splitlines()[-1], err
    (folder / "own.py").write_text(DENSE + HOOK.replace("(learning_rate)\n", "(0.1)\n"))
    code, _, err = run_find_lr(folder, monkeypatch, capfd, "own.py")
    assert code == 2 and "get_optimizer does not use its argument learning_rate" in err.splitlines()[-1], err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "5"), "jaxddp: --steps 5: expected 10 to 100,000"),
        (("--lowest", "2", "--highest", "1"), "jaxddp: --lowest 2 and --highest 1: give a lower and a higher rate"),
        (("--out", "no/x.png"), "jaxddp: no/x.png: cannot be written (No such file or directory); choose another"),
    ],
)
def test_a_wrong_option_raises_a_one_line_error(folder, monkeypatch, capfd, words, message):
    code, _, err = run_find_lr(folder, monkeypatch, capfd, "recipe.py", *words)
    assert code == 2 and err.splitlines()[-1].startswith(message)
