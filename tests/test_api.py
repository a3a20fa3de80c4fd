"""The Python API for notebooks: it accepts any model, loss, optimizer and data source, and draws figures."""

import dataclasses
import functools
import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.cases import ci_case
from support.data import CLASSES, random_table
from support.errors import error_line
from support.ilsvrc import write_tree
from support.networks import SmallNet, largest_difference, linear_model
from support.processes import checkpoint_steps
from support.shared import sgd, shared

import jaxddp
from jaxddp import InputError, prepare_training, train
from jaxddp.core.errors import Preempted, Unreachable
from jaxddp.data.source import Source, check_source
from jaxddp.engine.parts import averages, guard
from jaxddp.workdir.lock import locked

TABLE, VAL = random_table(50), random_table(23, seed=1)
SGD = sgd(0.05, momentum=0.9)


def prepared(*arguments, **named) -> jaxddp.RunSetup:
    """Return the setup of `prepare_training`, with the programs that were compiled for equal objects."""
    return shared(prepare_training(*arguments, **named))


class LinenDense(nn.Module):
    classes: int = CLASSES
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.classes, kernel_init=self.kernel_init)(images.mean((1, 2)))


class NNXDense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(3, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.dense(images.mean((1, 2)))


def function_dense():
    def init(key, example):
        return {"kernel": jnp.zeros((3, CLASSES)), "bias": jnp.zeros(CLASSES)}

    def apply(params, images):
        return images.mean((1, 2)) @ params["kernel"] + params["bias"]

    return init, apply


def with_weights(setup: jaxddp.RunSetup) -> jaxddp.RunSetup:
    """Return the setup with fixed parameters, which are the same for Linen, NNX and function models."""
    rng = np.random.default_rng(3)
    weights = {2: rng.normal(size=(3, CLASSES)), 1: rng.normal(size=CLASSES)}
    params = jax.tree.map(lambda x: weights[x.ndim].astype(np.float32), setup.state.params)
    return dataclasses.replace(setup, state=setup.state.replace(params=setup.topology.replicate(params)))


@pytest.mark.slow
def test_linen_nnx_and_function_models_train_to_the_same_numbers():
    results, on_other_devices = [], NNXDense(nnx.Rngs(0))
    sharding = jax.NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[1:3]), jax.P())
    nnx.update(on_other_devices, jax.device_put(nnx.state(on_other_devices), sharding))
    boxed = LinenDense(kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    for model in (boxed, on_other_devices, function_dense()):
        setup = with_weights(prepare_training(model, TABLE, 1, SGD, 8, epochs=3))
        state, history = train(jaxddp.softmax_cross_entropy, setup, val=VAL, log_every="1 step")
        kernel = next(leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim == 2)
        results.append((history.train["loss"], history.val["loss"], np.array(kernel)))
    for losses, validation, kernel in results[1:]:
        assert np.abs(losses - results[0][0]).max() < 1e-6
        assert np.abs(validation - results[0][1]).max() < 1e-6
        assert np.abs(kernel - results[0][2]).max() < 1e-6


def test_each_device_gets_its_rows_of_a_batch():
    setup = prepare_training(LinenDense(), TABLE, jax.devices()[:3], SGD, 5)
    assert [(rows.start, rows.stop) for _, rows in setup.slices] == [(0, 5), (5, 10), (10, 15)]
    assert "global batch 15 over 3 devices" in str(setup)
    assert f"{jax.devices()[2]}: rows 10:15" in str(setup)
    for (device, rows), shard in zip(setup.slices, next(setup.batches(0, 1)).row.addressable_shards, strict=True):
        assert shard.device == device
        assert (np.asarray(shard.data) == setup.feed.order.rows(0)[rows]).all()


@pytest.mark.slow
def test_a_setup_trains_again_to_the_same_numbers_and_can_be_continued(tmp_path):
    setup = prepared(SmallNet(batch_norm=True), TABLE, 2, SGD, 4, epochs=2)
    trained, history = train(jaxddp.softmax_cross_entropy, setup, val=VAL)
    repeated, _ = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path)
    assert largest_difference(trained, repeated) == 0
    other = dataclasses.replace(setup, state=trained.map_params(lambda tree: jax.tree.map(jnp.zeros_like, tree)))
    line = error_line(train, jaxddp.softmax_cross_entropy, other, epochs=4, workdir=tmp_path)
    assert line.startswith(f"state: it is not that of step 13 in {tmp_path}; leave it out, or give another workdir")
    continued_setup = dataclasses.replace(setup, state=trained)
    continued, _ = train(jaxddp.softmax_cross_entropy, continued_setup, epochs=4, workdir=tmp_path)
    uninterrupted, _ = train(jaxddp.softmax_cross_entropy, setup, epochs=4)
    assert largest_difference(continued, uninterrupted) == 0
    assert len(history.val["top1"]) == 2
    assert history._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_first_ctrl_c_saves_and_the_second_ends_the_run_at_once(tmp_path, caplog):
    class Interrupt:
        presses = 0

        def start(self, record):
            assert self.presses or signal.raise_signal(signal.SIGINT)

        def step(self, record):
            for _ in range(self.presses if record.step == 5 else 0):
                signal.raise_signal(signal.SIGINT)

        def end(self, record):
            assert record.status != "done" or signal.raise_signal(signal.SIGINT) is None

    setup, interrupt = prepared(LinenDense(), TABLE, 4, SGD, 2, epochs="7 steps", keep=3), Interrupt()
    settings: Any = {"log_every": "1 step", "save_every": "2 steps"}
    ends = (0, None, None, "$"), (2, 4, "interrupted", "$"), (1, 6, "preempted", "asked to stop: saved step 6 of 7; ")
    for presses, step, status, line in (*ends, (-1, 7, "done", "interrupted; the run had ended$")):
        interrupt.presses, workdir = presses, tmp_path / str(presses)
        with pytest.raises(KeyboardInterrupt, match=f"^{line}") as raised:
            train(jaxddp.softmax_cross_entropy, setup, workdir=workdir, listeners=[interrupt], **settings)
        assert len(getattr(raised.value, "_render_traceback_", list)()) == (2 if presses in (1, -1) else 0)
        if step is not None:
            result = json.loads((workdir / "result.json").read_text())
            assert (result["status"], checkpoint_steps(workdir)[-1]) == (status, step)
    warned = {record.thread for record in caplog.records if record.getMessage().startswith("Ctrl-C: ")}
    assert warned and threading.get_ident() not in warned  # This thread may have been writing.
    resumed, _ = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path / "1", **settings)
    uninterrupted, _ = train(jaxddp.softmax_cross_entropy, setup)
    assert largest_difference(resumed, uninterrupted) == 0 and checkpoint_steps(tmp_path / "1") == [4, 6, 7]


@pytest.mark.slow
def test_sigterm_in_a_script_saves_and_the_next_call_continues(tmp_path):
    class Terminate(jaxddp.History):
        def step(self, record):
            if record.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    setup = prepared(LinenDense(), TABLE, 4, SGD, 2, epochs=1)
    settings = {"workdir": tmp_path, "log_every": "1 step"}
    with pytest.raises(Preempted, match="saved step"):
        train(jaxddp.softmax_cross_entropy, setup, listeners=[Terminate()], **settings)
    assert signal.getsignal(signal.SIGTERM) == handler
    resumed, _ = train(jaxddp.softmax_cross_entropy, setup, **settings)
    uninterrupted, _ = train(jaxddp.softmax_cross_entropy, setup)
    assert largest_difference(resumed, uninterrupted) == 0


@pytest.mark.slow
def test_a_work_directory_accepts_only_its_own_recipe_and_one_run(tmp_path):
    setup = prepared(LinenDense(), TABLE, 4, SGD, 2, epochs=1)
    finished, _ = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path)
    repeated, history = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path, log_every="1 step")
    assert largest_difference(finished, repeated) == 0 and history.train["step"].tolist() == [7]
    other_seed = prepared(LinenDense(), TABLE, 4, SGD, 2, epochs=1, seed=3)
    with pytest.raises(InputError, match="config.json: seed was 0 and is now 3; a resumed run keeps its recipe"):
        train(jaxddp.softmax_cross_entropy, other_seed, workdir=tmp_path)
    smaller_table = prepared(LinenDense(), random_table(40), 4, SGD, 2, epochs=2)
    with pytest.raises(InputError, match="config.json: table.fingerprint was '.*' and is now '.*'"):
        train(jaxddp.softmax_cross_entropy, smaller_table, workdir=tmp_path)
    with locked(tmp_path), pytest.raises(Unreachable, match=f"{tmp_path}: another run is writing there"):
        train(jaxddp.softmax_cross_entropy, setup, epochs=2, workdir=tmp_path)
    # JSON cannot store NumPy numbers, such as these means.
    data = dataclasses.replace(setup.config.data, mean=tuple(map(np.float32, setup.config.data.mean)))
    longer_run = prepared(LinenDense(), TABLE, 4, SGD, 2, epochs=2, data=data)
    state, _ = train(jaxddp.softmax_cross_entropy, longer_run, workdir=tmp_path / "numpy")
    assert json.loads((tmp_path / "numpy" / "config.json").read_text())["seed"] == 0
    assert (int(finished.step), int(state.step)) == (7, 13)


@pytest.mark.slow
def test_a_learning_rate_in_the_optimizers_state_is_part_of_the_recipe_too(tmp_path):
    def setup_with_rate(rate):
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        return prepare_training(linear_model(), TABLE, 1, optimizer, 8, epochs=1)

    state, _ = train(jaxddp.softmax_cross_entropy, setup_with_rate(0.1), workdir=tmp_path)
    # Without this error, the run would continue with the rate in the checkpoint.
    with pytest.raises(InputError, match="config.json: optimizer was '.* 0.1' and is now '.* 0.2"):
        train(jaxddp.softmax_cross_entropy, setup_with_rate(0.2), workdir=tmp_path)
    repeated, _ = train(jaxddp.softmax_cross_entropy, setup_with_rate(0.1), workdir=tmp_path)
    assert largest_difference(state, repeated) == 0


def test_labels_beyond_the_classes_are_rejected_from_every_source():
    table = random_table(20)
    # An ArrayTable checks labels when it is made. A label that is set later stands for a user's source without checks.
    table.labels[3] = CLASSES
    with pytest.raises(InputError, match="^training data: row 3 has label 5 of 5 classes"):
        prepare_training(linear_model(), table, 4, SGD, 2)


def test_evaluation_data_must_have_the_image_shape_and_classes_of_the_training_data(tmp_path):
    setup = prepared(LinenDense(), TABLE, 4, SGD, 2, epochs=1)

    def train_with_validation(images, names):
        train(jaxddp.softmax_cross_entropy, setup, val=jaxddp.ArrayTable(images, np.zeros(len(images), int), names))

    message = "validation data: class 1 is 'c', and class 1 is 'b' in the training data; select the same"
    with pytest.raises(InputError, match=message):
        train_with_validation(VAL.images, tuple("acbde"))
    with pytest.raises(InputError, match="validation data: 4 classes, and 5 classes in the training data; select"):
        train_with_validation(VAL.images, tuple("acde"))
    with pytest.raises(InputError, match=r"validation data: images of \(5, 6, 3\), and images of \(6, 6, 3\) in the"):
        train_with_validation(VAL.images[:, 1:], tuple("abcde"))
    files = jaxddp.train_solutions(write_tree(tmp_path, classes=CLASSES, images=2, val=2, size=20))
    of_files = prepare_training(linear_model(), files, 2, SGD, 2, data=jaxddp.DataConfig(image_size=16, resize=15))
    with pytest.raises(InputError, match="data.resize=15: .* set data.resize to 16 or more"):
        train(jaxddp.softmax_cross_entropy, of_files, val=jaxddp.val_solutions(tmp_path))
    # Not at the first validation, which may be hours later.
    (tmp_path / "ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_00000002.JPEG").unlink()
    with pytest.raises(InputError, match=r"val_00000002\.JPEG: the image is missing"):
        train(jaxddp.softmax_cross_entropy, of_files, val=jaxddp.val_solutions(tmp_path))


def test_a_run_has_as_many_means_as_channels_and_works_with_a_mesh_and_strict_settings_of_jax(tmp_path):
    table = jaxddp.ArrayTable(np.zeros((8, 6, 6, 4), np.uint8), np.arange(8) % 2, tuple("abcde"))
    message = r"data.mean has 3 values, .* images of \(6, 6, 4\) have 4 channels; give a value"
    with pytest.raises(InputError, match=message):
        prepare_training(LinenDense(), table, 4, SGD, 2)
    augment = jaxddp.AugmentConfig(flip=False, erase=0.5, cutmix=1.0, cutout=2)
    four_channels, adam = jaxddp.DataConfig(mean=(0.5,) * 4, std=(0.2,) * 4, augment=augment), optax.adam(0.1)
    weighted = jaxddp.losses.cross_entropy(class_weights=[1, 2, 3, 4, 5])
    strict = jax.transfer_guard("disallow"), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with jax.set_mesh(jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])):
        with strict[0], strict[1], strict[2]:
            options = {"data": four_channels, "ema": 0.5, "metrics": {"f1": jaxddp.metrics.F1()}}
            setup = prepare_training(LinenDense(), table, 2, adam, 4, **options)
            for epochs in (1, 2):
                state, _ = train(weighted, setup, epochs=epochs, val=table, workdir=tmp_path)
        predictions = jaxddp.load_run(tmp_path, model=LinenDense()).predict(table)
    assert (int(state.step), len(predictions.ids)) == (2, 8)


@pytest.mark.slow
def test_a_run_accepts_any_loss_any_optimizer_and_further_evaluators():
    def squared_error(logits, labels):
        return ((logits - jax.nn.one_hot(labels, CLASSES)) ** 2).mean()

    setup = prepare_training(linear_model(), TABLE, 2, optax.lion(1e-3), 5, epochs=1)
    norms = []

    def weight_norm(state):
        norms.append(float(jnp.linalg.norm(state.params["weight"])))
        return {"weight_norm": norms[-1]}

    state, history = train(squared_error, setup, val=VAL, evaluators=[weight_norm])
    assert history.val["weight_norm"].tolist() == norms
    assert jaxddp.evaluate(state, setup, VAL, squared_error)["loss"] == pytest.approx(history.val["loss"][-1])


def test_topk_accuracy_equals_numpy():
    setup = prepared(linear_model(), TABLE, 4, SGD, 2)
    _, apply = linear_model()
    images = (VAL.images / 255 - np.array(setup.config.data.mean)) / np.array(setup.config.data.std)
    order = np.argsort(-np.asarray(apply(jax.device_get(setup.state.params), images)), kind="stable")
    expected = {k: float(np.mean([y in top[:k] for y, top in zip(VAL.labels, order, strict=True)])) for k in (1, 3, 5)}
    measured = jaxddp.topk_accuracy(setup.state, setup, VAL, k=(1, 3, 5))
    assert measured == pytest.approx(expected)
    assert measured[5] == 1
    with pytest.raises(InputError, match="k=10: expected 1 to 5"):
        jaxddp.topk_accuracy(setup.state, setup, VAL, k=(10,))


def test_pictures_of_normalized_images_have_the_predictions_of_these_images():
    images = (VAL.images / 255 - 0.5).astype(np.float32)
    table = jaxddp.ArrayTable(images, VAL.labels, VAL.class_names, "normalized")
    init, apply = linear_model()
    setup = prepared((init, apply), table, 1, SGD, 2)
    figure = jaxddp.show_predictions(setup.state, setup, table, count=7)
    predicted = np.argmax(apply(setup.state.params, jnp.asarray(images[:7])), -1)
    titles = [axes.get_title().split()[0] for axes in figure.axes if axes.get_title()]
    assert titles == [VAL.class_names[label] for label in predicted]
    # Without mean and deviation, the numbers are drawn between black and white.
    assert jaxddp.show_inputs(setup, count=3)._repr_png_().startswith(b"\x89PNG")


def doubled(logits, labels):
    return 2 * jaxddp.softmax_cross_entropy(logits, labels)


class ScaledDense(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, images):
        return nn.Dense(CLASSES)(images.mean((1, 2)) * self.width)


def train_scaled(workdir: Path, **changes):
    arguments = {"model": ScaledDense(), "optimizer": SGD, "loss": jaxddp.softmax_cross_entropy, **changes}
    loss, model, optimizer = (arguments.pop(name) for name in ("loss", "model", "optimizer"))
    return train(loss, prepared(model, TABLE, 4, optimizer, 2, epochs=1, **arguments), workdir=workdir, listeners=())


@pytest.fixture(scope="module")
def repeated_run(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("repeated")
    first, repeated = (train_scaled(workdir)[0] for _ in range(2))
    assert largest_difference(first, repeated) == 0
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": doubled}, "loss was 'softmax_cross_entropy .*' and is now 'doubled .*'"),
        ({"optimizer": sgd(0.06, momentum=0.9)}, "optimizer was '.*' and is now '.*'"),
        ({"metrics": {"half": lambda logits, labels: labels / 2}}, "metric half was None and is now"),
        ({"model": ScaledDense(4)}, "model was 'ScaledDense .*' and is now 'ScaledDense .*'"),
        ({"initialize": lambda *fresh: fresh}, "initialize was None and is now '<lambda> .*'"),
        ci_case({"weights": "."}, "weights was None and is now '.'"),
        ci_case({"parts": [averages.ParameterAverage(0.9), guard.LossScale(8)]}, "parts .* 'average .*, loss_scale "),
    ],
)
def test_resuming_with_another_object_names_the_object(change, message, repeated_run, monkeypatch):
    monkeypatch.chdir(repeated_run)  # The run is its own weights.
    line = error_line(train_scaled, repeated_run, **change)
    assert re.search(f"config.json: {message}", line) and "a resumed run keeps its recipe" in line


def test_a_step_without_jit_is_an_error_and_one_that_makes_a_nan_names_its_line(tmp_path):
    with jax.disable_jit():
        assert error_line(train_scaled, tmp_path).startswith("jax_disable_jit is set: a step is always compiled; ")
    init, apply = linear_model()
    setup = prepare_training((init, lambda params, images: jnp.log(-1 - apply(params, images) ** 2)), TABLE, 1, SGD, 8)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        train(jaxddp.softmax_cross_entropy, setup)
    assert f"{Path(__file__).name}:" in error.value.__notes__[-1]


def falling(step):
    return 1 / (1 + step)


@pytest.mark.slow
def test_resuming_without_the_schedule_or_with_another_names_the_argument(tmp_path):
    setup = prepared(ScaledDense(), TABLE, 4, SGD, 2, epochs=1)

    def run(workdir, schedule):
        options = {"schedule": schedule, "workdir": tmp_path / workdir, "save_every": "1 step", "listeners": ()}
        return train(jaxddp.softmax_cross_entropy, setup, epochs=2, **options)[0]

    def resume_error(workdir, schedule):
        line = error_line(run, workdir, schedule)
        start, end = f"{tmp_path / workdir}/config.json: schedule was ", "set it back, or start in another workdir"
        assert line.startswith(start) and line.endswith(end)
        return line

    train(jaxddp.softmax_cross_entropy, setup, schedule=falling, workdir=tmp_path / "w", listeners=())
    assert re.search(
        r"schedule was 'falling [0-9a-f]{12}' and is now None; a resumed run keeps", resume_error("w", None)
    )
    steeper = functools.wraps(falling)(lambda step: falling(2 * step))
    assert re.search(r"schedule was 'falling .*' and is now 'falling .*'", resume_error("w", steeper))
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda steps: run(f"cosine{steps}", optax.cosine_decay_schedule(1.0, steps)), (10, 20, 30))]
    assert "schedule was 'cosine_decay_schedule" in resume_error("cosine10", optax.cosine_decay_schedule(1.0, 20))
    # A new schedule object with equal values counts as the same schedule. The digest of another JAX release is not
    # compared, but a missing schedule is still an error.
    assert int(run("cosine10", optax.cosine_decay_schedule(1.0, 10)).step) == 13
    stored = json.loads((tmp_path / "w" / "config.json").read_text())
    stored["objects"]["jax"] = "0.1"
    (tmp_path / "w" / "config.json").write_text(json.dumps(stored))
    assert "schedule was 'falling " in resume_error("w", None)


@pytest.mark.slow
def test_objects_of_another_jax_release_are_not_compared_which_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    setup = prepared(ScaledDense(), TABLE, 4, SGD, 2, epochs=1)
    train(jaxddp.softmax_cross_entropy, setup, workdir="~", listeners=())
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["objects"]["jax"] == jax.__version__
    stored["objects"]["jax"] = "0.1"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    train(doubled, setup, workdir=tmp_path, listeners=())
    assert "written with jax 0.1; its model, loss and optimizer cannot be compared" in caplog.text


@pytest.mark.parametrize(
    ("apply", "output"),
    [
        (lambda params, images: images.mean((1, 2)) @ params, r"float32\[2, 7\]"),
        (lambda params, images: (images.mean((1, 2)) @ params[:, :5]).astype(int), r"int32\[2, 5\]"),
        (lambda params, images: (images, params), "an object of type tuple"),
        (lambda params, images, train: (images.mean((1, 2)) @ params)[:, : 7 if train else 5], r"float32\[2, 7\]"),
    ],
)
def test_outputs_that_are_no_logits_of_the_classes_raise_a_one_line_error(apply, output):
    """The model is checked both in evaluation and in training, before compilation."""
    model = (lambda key, example: jnp.zeros((3, 7)), apply)
    expected = (
        f"^the model returned {output} for 2 images; return logits, float\\[2, 5\\], one for each of the 5 classes"
    )
    with pytest.raises(InputError, match=expected) as error:
        prepare_training(model, TABLE, 4, SGD, 2)
    advice = ": the network's last layer has 7 outputs; give it 5" if output == r"float32\[2, 7\]" else ""
    assert str(error.value).removesuffix(advice).removesuffix(" in training").endswith(" of the data")


def test_images_without_labels_are_refused_for_training_and_shown_with_predictions():
    unlabelled = jaxddp.ArrayTable(VAL.images, np.full(len(VAL), -1), VAL.class_names)
    with pytest.raises(InputError, match=r"training data: row 0 .*has no label \(23 of 23"):
        prepare_training(ScaledDense(), unlabelled, 4, SGD, 2)
    setup = prepared(ScaledDense(), TABLE, 4, SGD, 2, epochs=1)
    with pytest.raises(InputError, match="validation data: .*has no label"):
        train(jaxddp.softmax_cross_entropy, setup, val=unlabelled, listeners=())
    figure = jaxddp.show_predictions(setup.state, setup, unlabelled, count=3)
    assert all("is " not in axes.get_title() for axes in figure.axes[:3]) and figure.axes[0].get_title()


@pytest.fixture
def shades() -> Source:
    """The data source in the docs, of 1000 images, which are computed when they are read."""
    text = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Shades" in block]
    exec(example, namespace := {})
    return check_source(namespace["Shades"](), "table")


def test_the_source_in_the_docs_has_exactly_the_members_of_a_source(shades):
    members = {*vars(Source), *Source.__annotations__}
    assert {name for name in dir(shades) if name[0] != "_"} == {name for name in members if name[0] != "_"}


@pytest.mark.slow
@pytest.mark.parametrize("cache", ("none", "device"))
def test_a_run_trains_and_evaluates_on_the_source_in_the_docs(cache, shades, tmp_path):
    class Listener:
        wants_predictions = 3

        def evaluation(self, record):
            self.predictions = record.predictions

    data, listener = dataclasses.replace(shades.default_data(), cache=cache), Listener()
    setup = prepared(LinenDense(classes=2), shades, 1, sgd(0.1), 50, epochs=1, data=data)
    options = {"workdir": tmp_path, "listeners": [listener], "eval_every": "50%"}
    state, history = train(jaxddp.softmax_cross_entropy, setup, val=shades, **options)
    assert (listener.predictions.images[:, 0, 0, 0] >= 150).tolist() == [*map(bool, listener.predictions.labels)]
    assert history.val["count"].tolist() == [1000, 1000] and history.val["loss"][-1] < history.val["loss"][0]
    assert jaxddp.topk_accuracy(state, setup, shades, k=(1,))[1] > 0.9
