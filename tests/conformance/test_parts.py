"""Every optional part of the step: N devices equal one, a resumed run equals the uninterrupted one, images in device
memory give the same steps, and a step reports the part's scalars. Each part has a separate test file."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import essential_and_rare, rare_case
from support.data import CLASSES, NO_AUGMENTATION, random_table
from support.faults import poisoned, spoil
from support.networks import largest_difference
from support.runs import Recorder, setup_of, train
from support.shared import sgd

from jaxddp.core.errors import Preempted
from jaxddp.engine import parts
from jaxddp.engine.parts.averages import LastAverage, Lookahead, ParameterAverage, RunningAverage, ScheduleFreeAverage
from jaxddp.engine.parts.configured import Plateau
from jaxddp.engine.parts.guard import GradientNorm, Guard, LossScale
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import EVAL_PARAMS
from jaxddp.training.checkpoints.manager import Checkpoints

STEPS, CLIP = 12, 0.25
# `spoil` makes the first pixel of row 7 NaN, in its batch of each epoch.
TABLE, POISONED, VAL = random_table(50), poisoned(7), random_table(23, seed=1)
CHANGES = {
    "train": {"duration": f"{STEPS} steps"},
    "log": {"every": "1 step"},
    "eval": {"every": "2 steps"},
    "checkpoint": {"every": "0 steps"},
}


def model_of(dtype: Any) -> tuple[Callable, Callable]:
    """Softmax regression in float64, with gradients that pass through another dtype."""

    def init(key, example):
        return {"weight": 0.1 * jax.random.normal(key, (example[0].size, CLASSES), jnp.float64)}

    def apply(params, images):
        logits = images.reshape(len(images), -1) @ params["weight"]
        return logits.astype(dtype).astype(logits.dtype)

    return init, apply


SGD = sgd(0.05, momentum=0.9)
WIDE, NARROW = model_of(jnp.float64), model_of(jnp.float16)
Metrics = list[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A part, the scalars that its step reports besides loss and top-1, and a check of its effect at a run's end."""

    parts: tuple[Part, ...]
    has_effect: Callable[[Any, Metrics], bool]
    reports: frozenset[str] = frozenset()
    optimizer: optax.GradientTransformation = SGD
    model: tuple[Callable, Callable] = WIDE
    table: Any = TABLE


def averages(state: Any, metrics: Metrics) -> bool:
    return largest_difference(state.eval_params, state.params) > 1e-3


def scales_both_ways(state: Any, metrics: Metrics) -> bool:
    changes = np.sign(np.diff([each["loss_scale"] for each in metrics]))
    return {-1, 1} <= set(changes.tolist())


CASES = {
    "average": Case((ParameterAverage(0.9, every=2),), averages),
    "swa": Case((LastAverage(STEPS - 4),), averages),
    "lookahead": Case(
        (Lookahead(5, optax.constant_schedule(0.5), STEPS),),
        lambda state, metrics: largest_difference(state.parts["lookahead"]["params"], state.params) == 0,
    ),
    "gradient_norm": Case(
        (GradientNorm(CLIP),),
        lambda state, metrics: min(each["gradient_norm"] for each in metrics) > CLIP,
        frozenset({"gradient_norm"}),
    ),
    "guard": Case(
        (ParameterAverage(0.9), Guard()),
        lambda state, metrics: 1 <= sum(np.isnan(each["loss"]) for each in metrics) <= 2,
        table=POISONED,
    ),
    "loss_scale": Case(
        (Guard(), LossScale(8, 2.0**21, growth_interval=2)), scales_both_ways, frozenset({"loss_scale"}), model=NARROW
    ),
    # At this learning rate the loss rises and falls.
    "plateau": Case(
        (Plateau(factor=0.5, patience=1),),
        lambda state, metrics: state.parts["plateau"]["rule"].scale < 1,
        optimizer=sgd(3.0),
    ),
    # The part is added automatically with such an optimizer.
    "schedule_free": Case((), averages, optimizer=optax.contrib.schedule_free_sgd(0.1)),
}


def make_setup(name: str, devices: int, cache: str):
    case, data = CASES[name], dataclasses.replace(NO_AUGMENTATION, cache=cache)
    settings = {"parts": case.parts, "augmentation": spoil, "data": data, "seed": 5}
    return setup_of(case.model, case.optimizer, case.table, devices=devices, **settings)


def run(name: str, devices: int = 4, cache: str = "none", **more: Any) -> tuple[Any, Metrics]:
    """Return the state at the end of a run in float64, and the report of each step."""
    records = Recorder()
    with jax.enable_x64(True):
        state = jax.device_get(train(make_setup(name, devices, cache), CHANGES, val=VAL, listeners=[records], **more))
    return state, [record.metrics for record in records.steps]


uninterrupted = functools.cache(run)


def assert_close(one: tuple[Any, Metrics], other: tuple[Any, Metrics], bound: float) -> None:
    """Compare reports; NaN, the metric of a skipped step, equals NaN."""
    (state, metrics), (other_state, other_metrics) = one, other
    assert [each.keys() for each in metrics] == [each.keys() for each in other_metrics]
    values = ([list(each.values()) for each in found] for found in (metrics, other_metrics))
    np.testing.assert_allclose(*values, rtol=bound, atol=bound)
    for leaf, their in zip(*map(jax.tree.leaves, (state, other_state)), strict=True):
        np.testing.assert_allclose(leaf, their, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_a_step_reports_the_parts_scalars_and_the_part_has_an_effect(name):
    state, metrics = uninterrupted(name, 4, "none")
    assert len(metrics) == int(state.step) == STEPS
    assert {frozenset(each) for each in metrics} == {CASES[name].reports | {"loss", "top1"}}
    assert CASES[name].has_effect(state, metrics)


@pytest.mark.parametrize("devices", essential_and_rare((1,), 2, 8))
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_devices_equals_one(name, devices):
    assert_close(uninterrupted(name, 4, "none"), uninterrupted(name, devices, "none"), 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_images_on_the_devices_give_the_same_steps(name):
    assert_close(uninterrupted(name, 4, "none"), uninterrupted(name, 4, "device"), 1e-9)


@pytest.mark.parametrize("cache", essential_and_rare(("none",), "device"))
@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_part_that_is_resumed_equals_an_uninterrupted_one_bit_for_bit(name, cache, tmp_path):
    assert_close(resumed(name, 4, cache, tmp_path), uninterrupted(name, 4, cache), 0)


@pytest.mark.parametrize("name", ["average", *(rare_case(name) for name in CASES if name != "average")])
def test_a_run_with_a_part_that_is_resumed_on_other_devices_is_the_same_run(name, tmp_path):
    assert_close(resumed(name, 1, "none", tmp_path), uninterrupted(name, 4, "none"), 1e-9)


def resumed(name: str, devices: int, cache: str, folder: Path) -> tuple[Any, Metrics]:
    """Interrupt a run twice, and resume it with another number of devices."""
    metrics: Metrics = []
    checkpoints = Checkpoints(folder / "checkpoints")
    for begin, end in ((None, 3), (3, 8)):
        records, words = Recorder(), {"checkpoints": checkpoints, "resume_step": begin, "val": VAL}
        with jax.enable_x64(True), pytest.raises(Preempted):
            stop = lambda step, end=end: step == end  # noqa: E731
            train(make_setup(name, 4, cache), CHANGES, should_stop=stop, listeners=[records], **words)
        metrics += [record.metrics for record in records.steps]
    state, last_metrics = run(name, devices, cache, checkpoints=checkpoints, resume_step=8)
    return state, metrics + last_metrics


def test_every_part_has_a_case():
    for module in pkgutil.iter_modules(parts.__path__, parts.__name__ + "."):
        importlib.import_module(module.name)
    kinds = {*Part.__subclasses__(), *RunningAverage.__subclasses__()} - {RunningAverage}
    of_the_package = {kind for kind in kinds if kind.__module__.startswith(parts.__name__)}
    assert {ScheduleFreeAverage, *(type(part) for case in CASES.values() for part in case.parts)} == of_the_package
    with jax.enable_x64(True):
        assert list(make_setup("schedule_free", 4, "none").state.parts["schedule_free"]) == [EVAL_PARAMS]
