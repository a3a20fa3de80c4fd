"""The notebook's door: any model, any loss, any optimizer, and figures that can be looked at."""

import dataclasses
import json
import os
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ilsvrc import write_tree
from small import CLASSES, SmallNet, largest_difference, linear_model, random_table

import jaxddp
from jaxddp import InputError, prepare_training, train
from jaxddp.errors import Preempted
from jaxddp.experiment.resume import held

TABLE, VAL = random_table(50), random_table(23, seed=1)
SGD = optax.sgd(0.05, momentum=0.9)


class LinenDense(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.Dense(CLASSES)(images.mean((1, 2)))


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
    """The three forms of the network, begun from the same numbers."""
    rng = np.random.default_rng(3)
    weights = {2: rng.normal(size=(3, CLASSES)), 1: rng.normal(size=CLASSES)}
    params = jax.tree.map(lambda x: weights[x.ndim].astype(np.float32), setup.state.params)
    return dataclasses.replace(setup, state=setup.state.replace(params=setup.topology.replicate(params)))


def test_linen_nnx_and_function_models_train_to_the_same_numbers():
    figures = []
    for model in (LinenDense(), NNXDense(nnx.Rngs(0)), function_dense()):
        setup = with_weights(prepare_training(model, TABLE, 4, SGD, 2, epochs=3))
        state, history = train(jaxddp.softmax_cross_entropy, setup, val=VAL, log_every="1 step")
        kernel = next(leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim == 2)
        figures.append((history.train["loss"], history.val["loss"], np.array(kernel)))
    for losses, validation, kernel in figures[1:]:
        assert np.abs(losses - figures[0][0]).max() < 1e-6
        assert np.abs(validation - figures[0][1]).max() < 1e-6
        assert np.abs(kernel - figures[0][2]).max() < 1e-6


def test_devices_by_number_or_by_name_and_what_each_gets():
    setup = prepare_training(LinenDense(), TABLE, jax.devices()[:3], SGD, 5)
    assert [(rows.start, rows.stop) for _, rows in setup.slices] == [(0, 5), (5, 10), (10, 15)]
    assert "global batch 15 over 3 devices" in str(setup)
    assert f"{jax.devices()[2]}: rows 10:15" in str(setup)
    batch = next(setup.batches(0, 1))
    for (device, rows), shard in zip(setup.slices, batch.row.addressable_shards, strict=True):
        assert shard.device == device
        assert (np.asarray(shard.data) == setup.order.rows(0)[rows]).all()


def test_a_setup_trains_again_to_the_same_numbers_and_can_be_continued():
    setup = prepare_training(SmallNet(batch_norm=True), TABLE, 4, SGD, 2, epochs=2)
    first, history = train(jaxddp.softmax_cross_entropy, setup, val=VAL)
    again, _ = train(jaxddp.softmax_cross_entropy, setup)
    assert largest_difference(first, again) == 0
    further = dataclasses.replace(setup, state=first, epochs=4)
    longer, _ = train(jaxddp.softmax_cross_entropy, further)
    whole, _ = train(jaxddp.softmax_cross_entropy, dataclasses.replace(setup, epochs=4))
    assert largest_difference(longer, whole) == 0
    assert len(history.val["top1"]) == 2
    assert history._repr_png_().startswith(b"\x89PNG")


def test_interrupted_in_a_notebook_and_called_again_goes_on(tmp_path):
    class Interrupt(jaxddp.History):
        def step(self, record):
            if record.step == 5:
                raise KeyboardInterrupt

    setup = prepare_training(LinenDense(), TABLE, 4, SGD, 2, epochs=1)
    with pytest.raises(KeyboardInterrupt):
        train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path, log_every="1 step", save_every="2 steps",
              listeners=[Interrupt()])  # fmt: skip
    resumed, _ = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path, log_every="1 step", save_every="2 steps")
    whole, _ = train(jaxddp.softmax_cross_entropy, setup)
    assert largest_difference(resumed, whole) == 0


def test_sigterm_in_a_script_saves_and_the_next_call_goes_on(tmp_path):
    class Terminate(jaxddp.History):
        def step(self, record):
            if record.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    setup = prepare_training(LinenDense(), TABLE, 4, SGD, 2, epochs=1)
    settings = {"workdir": tmp_path, "log_every": "1 step"}
    with pytest.raises(Preempted, match="saved step"):
        train(jaxddp.softmax_cross_entropy, setup, listeners=[Terminate()], **settings)
    assert signal.getsignal(signal.SIGTERM) == before
    resumed, _ = train(jaxddp.softmax_cross_entropy, setup, **settings)
    whole, _ = train(jaxddp.softmax_cross_entropy, setup)
    assert largest_difference(resumed, whole) == 0


def test_a_work_directory_keeps_to_its_recipe_and_to_one_run(tmp_path):
    setup = prepare_training(LinenDense(), TABLE, 4, SGD, 2, epochs=1)
    first, _ = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path)
    again, history = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path, log_every="1 step")
    assert largest_difference(first, again) == 0 and not history.train
    other = prepare_training(LinenDense(), TABLE, 4, SGD, 2, epochs=1, seed=3)
    with pytest.raises(InputError, match="config.json: seed was 0 and is now 3; a resumed run keeps its recipe"):
        train(jaxddp.softmax_cross_entropy, other, workdir=tmp_path)
    fewer = prepare_training(LinenDense(), random_table(40), 4, SGD, 2, epochs=2)
    with pytest.raises(InputError, match="config.json: fingerprint.train was '.*' and is now '.*'"):
        train(jaxddp.softmax_cross_entropy, fewer, workdir=tmp_path)
    longer = dataclasses.replace(setup, epochs=2)
    with held(tmp_path), pytest.raises(InputError, match=f"{tmp_path}: another run is at work there"):
        train(jaxddp.softmax_cross_entropy, longer, workdir=tmp_path)
    # As if written before it was; and with numbers that JSON has no word for.
    (tmp_path / "config.json").unlink()
    mean = tuple(map(np.float32, longer.data.mean))
    longer = dataclasses.replace(longer, data=dataclasses.replace(longer.data, mean=mean))
    state, _ = train(jaxddp.softmax_cross_entropy, longer, workdir=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0
    assert (int(first.step), int(state.step)) == (7, 13)


def test_what_a_model_is_measured_over_is_like_what_it_is_trained_on(tmp_path):
    setup = prepare_training(LinenDense(), TABLE, 4, SGD, 2, epochs=1)

    def measure(images, names):
        val = jaxddp.ArrayTable(images, np.zeros(len(images), int), names)
        train(jaxddp.softmax_cross_entropy, setup, val=val)

    with pytest.raises(
        InputError, match="validation data: class 1 is 'c', and 'b' in the training data; select the same"
    ):
        measure(VAL.images, tuple("acde"))
    with pytest.raises(InputError, match="validation data: class 4 is None, and 'e'"):
        measure(VAL.images, tuple("abcd"))
    with pytest.raises(InputError, match=r"validation data: images of \(5, 6, 3\), and \(6, 6, 3\) in the training"):
        measure(VAL.images[:, 1:], tuple("abcde"))
    files = jaxddp.train_solutions(write_tree(tmp_path, classes=CLASSES, images=2, val=2, size=20))
    small = jaxddp.DataConfig(image_size=16, resize=15)
    of_files = prepare_training(linear_model(), files, 2, SGD, 2, data=small)
    with pytest.raises(InputError, match="data.resize=15: .* set data.resize to 16 or more"):
        train(jaxddp.softmax_cross_entropy, of_files, val=jaxddp.val_solutions(tmp_path))


def test_images_of_more_channels_than_have_a_mean_are_refused():
    images = np.zeros((8, 6, 6, 4), np.uint8)
    table = jaxddp.ArrayTable(images, np.arange(8) % 2, ("a", "b"))
    with pytest.raises(
        InputError, match=r"data.mean has 3 values, .* images of \(6, 6, 4\) have 4 channels; give a value"
    ):
        prepare_training(LinenDense(), table, 4, SGD, 2)
    four = jaxddp.DataConfig(mean=(0.5,) * 4, std=(0.2,) * 4, augment=jaxddp.AugmentConfig(flip=False))
    state, _ = train(jaxddp.softmax_cross_entropy, prepare_training(LinenDense(), table, 4, SGD, 2, data=four))
    assert int(state.step) == 1


def test_a_notebook_s_run_is_traced_and_compiled_with_options_as_the_terminal_s_is(tmp_path):
    setup = prepare_training(LinenDense(), TABLE, 2, SGD, 4, xla_options=["xla_cpu_enable_fast_min_max=true"])
    assert setup.compiler_options == {"xla_cpu_enable_fast_min_max": "True"}
    traced, _ = train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path, profile="2 steps")
    plain, _ = train(jaxddp.softmax_cross_entropy, setup)
    assert largest_difference(traced, plain) == 0
    assert len(list((tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb"))) == 1
    with pytest.raises(InputError, match=r"profile='2 steps': .* give workdir too"):
        train(jaxddp.softmax_cross_entropy, setup, profile="2 steps")
    with pytest.raises(InputError, match="parallel.xla_options: 'fast'; give NAME=VALUE"):
        prepare_training(LinenDense(), TABLE, 2, SGD, 4, xla_options=["fast"])


def test_any_loss_any_optimizer_and_further_evaluators():
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
    setup = prepare_training(linear_model(), TABLE, 4, SGD, 2)
    _, apply = linear_model()
    images = (VAL.images / 255 - np.array(setup.data.mean)) / np.array(setup.data.std)
    order = np.argsort(-np.asarray(apply(jax.device_get(setup.state.params), images)), kind="stable")
    expected = {k: float(np.mean([y in row[:k] for y, row in zip(VAL.labels, order, strict=True)])) for k in (1, 3, 5)}
    measured = jaxddp.topk_accuracy(setup.state, setup, VAL, k=(1, 3, 5))
    assert measured == pytest.approx(expected)
    assert measured[5] == 1
    with pytest.raises(InputError, match="k=10: expected 1 to 5"):
        jaxddp.topk_accuracy(setup.state, setup, VAL, k=(10,))


def test_predictions_are_shown_with_what_is_wrong_about_them():
    setup = prepare_training(linear_model(), TABLE, 4, SGD, 2)
    figure = jaxddp.show_predictions(setup.state, setup, VAL, count=7)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    right = jaxddp.topk_accuracy(setup.state, setup, VAL, k=(1,))
    assert len(titles) == 7
    assert all("%" in title for title in titles)
    assert sum("\nis " in title for title in titles) > 0 or right[1] == 1
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_images_without_labels_are_shown_with_the_classes_of_training(tmp_path):
    root = write_tree(tmp_path / "tree", classes=5, images=2, test=3, size=6)
    data = jaxddp.DataConfig(image_size=6, resize=6, crop="whole")
    setup = prepare_training(linear_model(), jaxddp.train_solutions(root), 2, SGD, 2, data=data)
    figure = jaxddp.show_predictions(setup.state, setup, jaxddp.test_listing(root))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == 3 and not any("\nis " in title for title in titles)


def test_files_and_arrays_go_through_the_same_door(tmp_path):
    root = write_tree(tmp_path / "tree", classes=3, images=13, val=5, size=20)
    data = jaxddp.DataConfig(image_size=16, resize=16, crop="whole", augment=jaxddp.AugmentConfig(pad=1))
    table, val = jaxddp.train_solutions(root), jaxddp.val_solutions(root)
    model = jaxddp.resnet("resnet10", table.num_classes, width=2, stem="small")
    setup = prepare_training(model, table, 4, SGD, 2, epochs=1, data=data)
    _, history = train(jaxddp.softmax_cross_entropy, setup, val=val)
    assert history.val["loss"].size == 1
    assert np.isfinite(history.train["loss"]).all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"devices": 9}, "devices=9: expected 1 to 8"),
        ({"devices": []}, "at least one device"),
        ({"batch_size_per_device": 0}, "batch size 0"),
        ({"batch_size_per_device": 51}, "larger than the data set of 50"),
        ({"model": 3}, "int"),
    ],
)
def test_bad_arguments(arguments, expected):
    given = {"model": LinenDense(), "devices": 1, "batch_size_per_device": 2, **arguments}
    with pytest.raises(InputError, match=expected):
        prepare_training(given["model"], TABLE, given["devices"], SGD, given["batch_size_per_device"])
