"""Distillation: the documented loss, on any number of devices, with a teacher from another run's work directory."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import essential_and_rare
from support.data import NO_AUGMENTATION, random_batch, random_table, write_arrays
from support.networks import largest_difference, linear_model, objective_of, train_steps
from support.recipes import DENSE
from support.runs import LEAN, changed, fails, setup_of, train
from support.shared import sgd, topology_of

import jaxddp
from jaxddp.augment.preprocess import Preprocess
from jaxddp.cli import main
from jaxddp.config import AugmentConfig, Config
from jaxddp.core.errors import InputError
from jaxddp.engine.state import TrainState
from jaxddp.engine.ways.way import Way
from jaxddp.inference.trained import TrainedRun
from jaxddp.losses import cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.objectives.distillation import Distillation
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.resources import Layout, Resources, TrainingData
from jaxddp.workdir.signature import Signature

SIGNATURE = Signature(tuple("abcde"), tuple("abcde"), (6, 6, 3), "uint8", True)
TABLE = random_table(50)
MEAN, STD = (0.3, 0.5, 0.4), (0.2, 0.1, 0.3)


def teacher_of(topology, dtype=jnp.float32, **more):
    """Return a linear teacher for one image size. Its weights and its normalization differ from the student's."""
    model = adapt(linear_model())
    params, model_state = model.init(jax.random.key(5), jnp.zeros((1, 6, 6, 3), dtype))
    state = topology.replicate(jax.device_get(TrainState(jnp.zeros((), jnp.int32), params, model_state, ())))
    preprocess = Preprocess(MEAN, STD, AugmentConfig(), dtype)
    run = TrainedRun(Path("teacher"), 0, Config(), model, state, preprocess, SIGNATURE, topology)
    return dataclasses.replace(run, **more)


def step_in_float64(devices: int, loss, share=0.7, pad=1):
    """Return the parameters before and after one step, the mean loss, and the teacher."""
    topology, batch = topology_of(devices), random_batch(24, masked=5)
    supervised = objective_of(linear_model(), loss, augment=AugmentConfig(flip=pad > 0, pad=pad))
    teacher = teacher_of(topology, jnp.float64)
    distilled = Distillation(lambda: teacher, 3.0, share)(supervised)
    (before, after), (sums,), _ = train_steps(supervised, Way(topology), [batch], minimized=distilled)
    return before, after, sums.means()["loss"], teacher


@pytest.mark.slow
@pytest.mark.parametrize("weights", essential_and_rare(((1.0, 4.0, 0.5, 2.0, 3.0),), None))
def test_a_step_is_the_same_on_any_number_of_devices(weights):
    with jax.enable_x64(True):
        loss = cross_entropy(0.1, weights)
        before, after, value, _ = step_in_float64(1, loss)
        assert largest_difference(before, after) > 1e-3
        _, other_params, other_value, _ = step_in_float64(8, loss)
        assert largest_difference(other_params, after) < 1e-9 and other_value == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("weights", (None, (1.0, 4.0, 0.5, 2.0, 3.0)))
def test_the_distillation_loss_equals_its_formula(weights):
    """Compute (1 - a) CE + a T^2 KL in NumPy, as a mean over the unmasked examples with their class weights."""
    with jax.enable_x64(True):
        params, _, value, teacher = step_in_float64(4, cross_entropy(0.0, weights), pad=0)
        batch, count = random_batch(24, masked=5), 19
        pixels = batch.image[:count] / 255

        def log_softmax(logits):
            return logits - np.log(np.exp(logits).sum(1, keepdims=True))

        def logits(weight, mean, std):
            return ((pixels - np.array(mean)) / np.array(std)).reshape(count, -1) @ np.asarray(weight)

        student = logits(params["weight"], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        teacher_log_probs = log_softmax(logits(teacher.state.params["weight"], MEAN, STD) / 3)
        hard = -log_softmax(student)[np.arange(count), batch.label[:count]]
        soft = (np.exp(teacher_log_probs) * (teacher_log_probs - log_softmax(student / 3))).sum(1)
    class_weights = np.array(weights or (1.0,) * 5)[batch.label[:count]]
    assert value == pytest.approx(np.average(0.3 * hard + 0.7 * 9 * soft, weights=class_weights), abs=1e-6)


def test_groups_of_devices_use_the_same_teacher():
    teacher, states = teacher_of(topology_of(4)), []
    objective = Distillation(lambda: teacher, 3.0, 0.7)
    for groups in (None, 2):
        parallel = {"self_test": "never", "groups": groups}
        config = Config().replace(parallel=parallel, train={"sync_every": groups and "1 step"})
        setup = setup_of(linear_model(), sgd(0.1), TABLE, devices=4, config=config, objective=objective)
        states.append(jax.device_get(train(setup, {"train": {"duration": "3 steps"}, "eval": {"every": "0 steps"}})))
    assert largest_difference(*states) < 1e-5


def test_the_divergence_equals_pytorchs():
    """The expected value is from torch 2.13: `16 * F.kl_div((student / 4).log_softmax(-1), (teacher / 4).softmax(-1),
    reduction="batchmean")`."""
    student = jnp.array([[1.0, -0.5, 2.0], [0.25, 0.0, -1.5], [3.0, 1.0, -2.0], [-1.0, 0.5, 0.75]])
    teacher = jnp.array([[2.0, 0.0, 1.0], [0.0, 1.0, -1.0], [0.5, 0.5, -2.0], [-1.0, 2.0, 0.0]])
    divergence = Distillation(lambda: teacher_of(Topology.create(1)), 4.0).divergence(teacher, student)
    assert float(divergence.mean()) == pytest.approx(0.4075199717948448, abs=1e-6)


def test_the_self_test_of_the_gradient_passes_with_a_teacher():
    config = Config().replace(parallel={"self_test": "always"})
    setup = setup_of(linear_model(), sgd(0.1), devices=4, config=config, data=NO_AUGMENTATION)
    distilled = changed(setup, {}, objective=jaxddp.distillation(teacher_of(setup.topology)))
    assert int(train(distilled, {"train": {"duration": "1 step"}}).step) == 1


OTHER_CLASSES = dataclasses.replace(SIGNATURE, class_ids=tuple("abcdx"))
OTHER_SIZE = dataclasses.replace(SIGNATURE, image_shape=(8, 8, 3))
OTHER_DTYPE = dataclasses.replace(SIGNATURE, dtype="float32")


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ({"signature": OTHER_CLASSES}, {}, "teacher was trained on other classes; give a"),
        ({"signature": OTHER_SIZE}, {}, r"was trained on images of \(8, 8, 3\), and this run has \(6, 6, 3\); use the"),
        ({"signature": OTHER_DTYPE}, {}, "was trained on float32 images, and this run has uint8 images; normalize the"),
        (None, {}, "is loaded on 1 device, and this run uses 2; load it with the same devices="),
        ({}, {"data": {"grow_from": 4, "grow_by": 2}}, r"this run's training images of \(4, 4, 3\) \(.+\); give a"),
        ({"config": Config().replace(objective={"name": "simsiam"})}, {}, "teacher has an untrained head, because"),
    ],
)
def test_an_unsuitable_teacher_raises_a_one_line_error(more, changes, message):
    resources, topology = make_resources()
    teacher = teacher_of(Topology.create(1)) if more is None else teacher_of(topology, **more)
    with pytest.raises(InputError, match=f"objective.teacher: .*{message}"):
        jaxddp.distillation(teacher).fingerprints(recipe_on(Config().replace(**changes), resources, topology))


def recipe_on(config: Config, resources: Resources, topology: Topology) -> Any:
    """Return what `Distillation.fingerprints` reads of a recipe."""
    config = config.replace(train={"batch_size": 8})
    layout = Layout.of(config, topology, TrainingData.of(resources.train, config.data))
    return SimpleNamespace(config=config, resources=resources, topology=topology, layout=layout)


def make_resources() -> tuple[Resources, Topology]:
    """Return resources and devices, with images like the teacher's, on two devices."""
    return Resources(random_table(30)), Topology.create(2)


def train_student(tmp_path, share=0.5, epochs=2, teacher=None, workdir="student"):
    setup = jaxddp.prepare_training(
        *(linear_model(), TABLE, 2, sgd(0.1), 4),
        epochs=epochs,
        objective="supervised" if teacher is None else jaxddp.distillation(teacher, teacher_share=share),
    )
    state, _ = jaxddp.train(
        *(jaxddp.softmax_cross_entropy, setup), listeners=(), workdir=tmp_path / workdir, self_test="never"
    )
    return np.asarray(state.params["weight"])


@pytest.mark.ci
def test_a_student_resumes_only_with_its_own_teacher(tmp_path):
    setup = jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(0.3), 4, epochs=1)
    jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), workdir=tmp_path / "teacher", self_test="never")
    teacher = jaxddp.load_run(tmp_path / "teacher", model=linear_model(), devices=2)
    train_student(tmp_path, epochs=1, teacher=teacher)
    reloaded = jaxddp.load_run((tmp_path / "teacher").rename(tmp_path / "moved"), model=linear_model(), devices=2)
    uninterrupted = train_student(tmp_path, teacher=reloaded, workdir="whole")
    np.testing.assert_array_equal(train_student(tmp_path, teacher=reloaded), uninterrupted)
    other_teacher = dataclasses.replace(teacher, state=jax.tree.map(lambda leaf: leaf * 2, teacher.state))
    with pytest.raises(InputError, match="fingerprint.teacher was '.{8}' and is now '.{8}'; a resumed run keeps"):
        train_student(tmp_path, epochs=3, teacher=other_teacher)
    with pytest.raises(InputError, match="objective was 'Distillation .*' and is now 'Distillation"):
        train_student(tmp_path, epochs=3, teacher=reloaded, share=0.25)
    with pytest.raises(InputError, match="fingerprint.teacher was '.{8}' and is now None; a resumed run keeps"):
        train_student(tmp_path, epochs=3)


# The tests above cover a teacher from Python.
@pytest.mark.ci
@pytest.mark.slow
def test_distillation_runs_from_the_command_line(tmp_path, capfd):
    file = write_arrays(tmp_path / "set.npz", random_table(30), random_table(9, seed=1))
    (tmp_path / "mine.py").write_text(DENSE)
    student, teacher = str(tmp_path / "student"), str(tmp_path / "teacher")
    common = ["train", str(tmp_path / "mine.py"), "--data.path", str(file), *LEAN, "--optimizer.warmup", "0 steps"]
    student_words = [*common, "--objective.name", "distillation", "--workdir", student]
    assert "objective.teacher: distillation has no teacher; give a run's work directory" in fails(student_words, capfd)
    line = fails([*student_words, "--objective.teacher", str(tmp_path / "none")], capfd)
    assert "objective.teacher: " in line and "no such file; give a run's work directory" in line
    assert not (tmp_path / "student").exists()
    assert main([*common, "--workdir", teacher]) == 0
    line = fails([*common, "--objective.teacher", teacher, "--workdir", student], capfd)
    assert "is read by objective.name=distillation, and not by supervised" in line
    assert main(["doctor", *student_words[1:], "--objective.teacher", teacher]) == 0
    assert main([*student_words, "--objective.teacher", teacher]) == 0
    config = json.loads((tmp_path / "student" / "config.json").read_text())
    assert set(config["fingerprint"]) == {"train", "val", "teacher"}
    # Evaluation needs no teacher, and a run resumes with a teacher that was moved.
    new_folder = str((tmp_path / "teacher").rename(tmp_path / "elsewhere"))
    assert main(["eval", str(tmp_path / "student" / "config.json")]) == 0
    resume_words = [*student_words, "--objective.teacher", new_folder, "--train.duration"]
    assert main([*resume_words, "12 steps"]) == 0
    line = fails([*resume_words, "12 steps", "--objective.temperature", "2"], capfd)
    assert "--objective.temperature was 4.0 and is now 2.0; a resumed run keeps its recipe" in line


def test_reproducible_distillation_is_refused():
    resources, topology = make_resources()
    config = Config().replace(parallel={"reproducible": True})
    with pytest.raises(InputError, match=r"^parallel\.reproducible: distillation does not give the same bits on any"):
        jaxddp.distillation(teacher_of(topology)).fingerprints(recipe_on(config, resources, topology))


def test_distillation_does_not_read_unlabelled_images():
    setup = setup_of(linear_model(), sgd(0.1), devices=2)
    resources = dataclasses.replace(setup.resources, unlabelled=random_table(60).without_labels())
    objects = {name: getattr(setup, name) for name in ("model", "optimizer", "loss", "eval_loss")}
    recipe_of = functools.partial(Recipe.of, setup.config, setup.topology, resources, setup.layout)
    sources = [
        recipe_of(objects | {"objective": objective}).feed.unlabelled
        for objective in (jaxddp.distillation(teacher_of(setup.topology)), lambda supervised: supervised)
    ]
    assert sources[0] is None and sources[1] is not None
