"""FixMatch: its loss equals the paper's on any number of devices, and the network predicts the pseudo-labels."""

import dataclasses
import functools
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import essential_and_rare
from support.data import CLASSES, random_batch, random_table, write_arrays
from support.networks import SmallNet, largest_difference, linear_model, objective_of, train_steps
from support.runs import changed, fails
from support.shared import sgd, shared, topology_of

import jaxddp
from jaxddp import ArrayTable, DataConfig, InputError, prepare_training
from jaxddp.cli import main
from jaxddp.config import AugmentConfig
from jaxddp.data.batch import Batch
from jaxddp.data.opening import few_labels
from jaxddp.engine import self_test
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.ways.reproducible import OrderedGradients, Reproducible
from jaxddp.engine.ways.way import Way
from jaxddp.objectives.choices import FixMatchSettings
from jaxddp.objectives.fixmatch import ADDED_METRICS
from jaxddp.setup.run_training import make_run

LINEAR, NORMED = linear_model(), SmallNet(batch_norm=True, sync="data", dtype=jnp.float64)
RECIPE = str(Path(__file__).parent / "recipes" / "small_recipe.py")
TABLE, VAL, OTHERS = random_table(50), random_table(20, seed=1), random_table(40, seed=2)
SGD = sgd(0.05)


def batch_with_unlabelled(size: int, ratio: int, *, seed: int = 0, masked: int = 0) -> Batch:
    """Return a batch with an unlabelled batch of several colours. The last examples of both are padding."""
    unlabelled, rng = random_batch(size * ratio, seed=100 + seed, masked=masked * ratio), np.random.default_rng(seed)
    image = (unlabelled.image * rng.random((size * ratio, 1, 1, 3))).astype(np.uint8)
    unlabelled = unlabelled._replace(image=image, label=np.full(size * ratio, -1, np.int32))
    return random_batch(size, seed=seed, masked=masked)._replace(unlabelled=unlabelled)


def cross_entropies(logits, labels):
    shifted = logits - logits.max(-1, keepdims=True)
    return np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(labels)), labels]


@pytest.mark.parametrize("masked", essential_and_rare((2,), 0))
def test_the_fixmatch_loss_equals_the_papers(masked):
    """Compute the loss of softmax regression in NumPy. Without augmentation, both views equal the image."""
    settings = FixMatchSettings(threshold=0.6, unlabelled_weight=0.7, strong_rand_augment=0, strong_cutout=0.0)
    batch = batch_with_unlabelled(6, 3, masked=masked)
    with jax.enable_x64(True):
        supervised = objective_of(linear_model())
        params = {"weight": jax.random.normal(jax.random.key(1), (108, CLASSES), jnp.float64) / 8}
        objective = settings.make(None, None)(supervised)

        def mean(params):
            sums, _ = objective(params, {}, batch, train=True, key=jax.random.key(0))
            return sums.values[0, 0] / sums.values[0, 1], sums

        (value, sums), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
        images = [np.asarray(supervised.preprocess(part, train=False).images) for part in (batch, batch.unlabelled)]
    unmasked = [slice(None, 6 - masked), slice(None, 18 - 3 * masked)]
    x, u = (image.reshape(len(image), -1)[rows] for image, rows in zip(images, unmasked, strict=True))
    logits, unlabelled_logits = x @ np.asarray(params["weight"]), u @ np.asarray(params["weight"])
    probabilities = np.exp(unlabelled_logits) / np.exp(unlabelled_logits).sum(-1, keepdims=True)
    confident, pseudo_labels = probabilities.max(-1) >= 0.6, probabilities.argmax(-1)
    assert 0.2 < confident.mean() < 0.9
    labelled = cross_entropies(logits, batch.label[unmasked[0]]).mean()
    unlabelled = (confident * cross_entropies(unlabelled_logits, pseudo_labels)).sum() / len(u)
    assert sums.names == ("loss", "top1", *ADDED_METRICS)
    means = sums.means()
    added = [means[name] for name in ADDED_METRICS]
    np.testing.assert_allclose(added, [labelled, unlabelled, confident.mean()], rtol=1e-9)
    np.testing.assert_allclose([value, means["loss"]], labelled + 0.7 * unlabelled, rtol=1e-9)
    # The labels are constants: only the strong view has a gradient.
    residual = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) - np.eye(CLASSES)[batch.label[unmasked[0]]]
    pseudo_residual = (probabilities - np.eye(CLASSES)[pseudo_labels]) * confident[:, None]
    expected = x.T @ residual / len(x) + 0.7 * u.T @ pseudo_residual / len(u)
    np.testing.assert_allclose(gradient["weight"], expected, atol=1e-9)


@pytest.mark.slow
def test_the_strong_view_is_augmented_more_and_each_view_has_its_own_random_numbers():
    def apply(params, state, images):
        return images.reshape(len(images), -1) @ params["weight"], {"seen": images}

    augment = AugmentConfig(flip=False, pad=2, mixup=1.0)
    model = (lambda key, example: (linear_model()[0](key, example), {"seen": example}), apply)
    supervised = objective_of(model, mean=(0.0,), std=(1.0,), augment=augment, dtype=jnp.float32)
    params, batch = linear_model()[0](jax.random.key(0), jnp.zeros((1, 6, 6, 3))), batch_with_unlabelled(6, 2)
    batch = batch._replace(unlabelled=batch.unlabelled._replace(image=np.full((12, 6, 6, 3), 200, np.uint8)))

    def views(**settings):
        objective = jax.jit(functools.partial(FixMatchSettings(**settings).make(None, None)(supervised), train=True))
        _, state = objective(params, {"seen": None}, batch, image_key=jax.random.key(3))
        # The network gets all views in one batch, so batch norm normalizes the views together.
        assert len(state["seen"]) == 30
        return np.split(np.asarray(state["seen"]), [6, 18])

    labelled, weak, strong = views(strong_rand_augment=0, strong_cutout=0.0)
    alone = jax.jit(lambda batch: supervised.preprocess(batch, train=True, key=jax.random.key(3)).images)
    np.testing.assert_array_equal(labelled, alone(batch))
    # Padded crops of a gray image show their position. Unlabelled images are not mixed, because they have no labels.
    assert set(np.unique(weak.round(3))) == set(np.unique(strong.round(3))) == {0, np.float32(0.784)}
    assert (weak != strong).any((1, 2, 3)).sum() > 6
    _, same, cut = views(strong_rand_augment=0, strong_cutout=0.5)
    np.testing.assert_array_equal(same, weak)
    lost = (cut != strong)[..., 0]
    assert not cut[lost].any() and 0 < lost.sum((1, 2)).max() <= 9
    _, same, changed = views(strong_rand_augment=1, strong_rand_magnitude=8.0, strong_cutout=0.0)
    np.testing.assert_array_equal(same, weak)
    assert len(np.unique(changed)) > 4


def noisy_logits(params, images, example_keys=None):
    """Return logits of softmax regression, with noise that is drawn for each example."""
    logits = LINEAR[1](params, images)
    if example_keys is None:
        return logits
    return logits + jax.vmap(lambda key: jax.random.normal(key, (CLASSES,)))(example_keys) / 8


KEYED = LINEAR[0], noisy_logits
# RandAugment takes long to compile. A separate test shows that it is the same on any device.
SETTINGS = FixMatchSettings(threshold=0.6, unlabelled_weight=2.0, strong_rand_augment=0, strong_cutout=0.3)


@functools.cache
def train_three_steps(net, devices: int, make_way: Any):
    """Return parameters, statistics and means of three steps of plain SGD in float64."""
    with jax.enable_x64(True):
        objective, way = objective_of(net, augment=AugmentConfig()), make_way(topology_of(devices))
        batches = [batch_with_unlabelled(8, 3, seed=number) for number in range(3)]
        key, minimized = jax.random.key(4), SETTINGS.make(None, None)(objective)
        params, sums, after = train_steps(objective, way, batches, key, minimized=minimized)
        pairs = zip(*map(jax.tree.leaves, (params[0], after.params)), strict=True)
        assert all(np.abs(a - b).max() > 1e-6 for a, b in pairs)
        return after.params, after.model_state, [each.means() for each in sums]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "devices", "make_way"),
    [
        (KEYED, 2, Way),
        (KEYED, 2, partial(Way, gradients=Gradients(accumulate=2))),
        (KEYED, 8, partial(Reproducible, gradients=OrderedGradients(for_cpu=True))),
        (NORMED, 4, Way),
    ],
)
def test_fixmatch_gives_the_same_result_on_any_number_of_devices(net, devices, make_way):
    on_one, on_several = train_three_steps(net, 1, Way), train_three_steps(net, devices, make_way)
    assert largest_difference(on_one, on_several) < 1e-9
    assert 0.3 < min(means["pseudo_labels"] for means in on_one[2]) < 1


def make_setup(table=None, unlabelled=OTHERS, devices: int = 2, **more):
    settings = {"objective": "fixmatch", **more, "epochs": 3, "unlabelled": unlabelled}
    if settings["objective"] == "fixmatch":
        settings = {"threshold": 0.22, "unlabelled_ratio": 3, "strong_rand_augment": 0} | settings
    table = few_labels(TABLE, 4) if table is None else table
    return shared(prepare_training(linear_model(), table, devices, SGD, 8 // devices, **settings))


def run(setup, **more):
    return jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), log_every="1 step", **more)


@pytest.fixture(scope="module")
def whole_run():
    """Return a setup, the state at the end of its eight steps, and the history."""
    setup = make_setup()
    return setup, *run(setup, val=VAL)


@pytest.mark.slow
def test_a_fixmatch_run_logs_its_metrics_and_validates_labelled_images(whole_run):
    _, state, history = whole_run
    assert int(state.step) == 8
    parts = history.train["supervised_loss"] + history.train["unlabelled_loss"]
    np.testing.assert_allclose(history.train["loss"], parts, rtol=1e-5)
    assert (history.train["pseudo_labels"] > 0).any() and (history.train["pseudo_labels"] <= 1).all()
    assert {"loss", "top1"} <= history.val.keys() and not set(ADDED_METRICS) & history.val.keys()


@pytest.mark.slow
def test_a_resumed_fixmatch_run_ends_with_the_same_bits(whole_run, tmp_path):
    setup, state, _ = whole_run

    class Interrupt(jaxddp.History):
        def step(self, record):
            if record.step == 5:
                signal.raise_signal(signal.SIGINT)

    settings = {"workdir": tmp_path, "save_every": "3 steps", "log_every": "1 step"}
    with pytest.raises(KeyboardInterrupt):
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=[Interrupt()], **settings)
    # A new setup resumes from the checkpoint of step 3.
    resumed, _ = jaxddp.train(jaxddp.softmax_cross_entropy, make_setup(), listeners=(), **settings)
    assert largest_difference(resumed, state) == 0
    for changed_setup, key in (
        (make_setup(threshold=0.3), "objective"),
        (make_setup(objective="supervised"), "objective"),
        (make_setup(unlabelled_ratio=2), "objective"),
        (make_setup(unlabelled=TABLE), "unlabelled.fingerprint"),
    ):
        with pytest.raises(InputError, match=f"config.json: {key} was '.*' and is now .*; a resumed run keeps its"):
            run(changed_setup, workdir=tmp_path)


def test_labels_of_the_unlabelled_images_do_not_change_training(whole_run):
    renamed = ArrayTable(OTHERS.images, (OTHERS.labels + 2) % CLASSES, OTHERS.class_names)
    state, history = run(make_setup(unlabelled=renamed))
    assert largest_difference(state, whole_run[1]) == 0
    assert (history.train["loss"] == whole_run[2].train["loss"]).all()
    other, _ = run(make_setup(unlabelled=TABLE))
    assert largest_difference(other, whole_run[1]) > 1e-4


@pytest.mark.slow
def test_images_on_the_devices_give_the_same_steps(whole_run):
    state, history = run(make_setup(data=DataConfig(augment=AugmentConfig(flip=False), cache="device")))
    np.testing.assert_allclose(history.train["loss"], whole_run[2].train["loss"], rtol=1e-5)
    assert largest_difference(state, whole_run[1]) < 1e-5


@pytest.mark.slow
def test_the_self_test_masks_labelled_and_unlabelled_images(whole_run, monkeypatch):
    monkeypatch.setattr(self_test, "MOST_DEVICES", 3)
    test = make_run(changed(make_setup(devices=8), {"parallel": {"self_test": "always"}}, VAL))
    assert test.self_test is not None
    # Larger weights give pseudo-labels without training.
    state = test.state.replace(params=jax.tree.map(lambda leaf: 3 * leaf, test.state.params))
    test.self_test(state, *next(test.chunks(0)).feed)
    assert list(test.self_test._unmasked_devices) == [0, 3, 6] and test.self_test._tolerance > 0


def test_an_objective_from_python_gets_the_unlabelled_images():
    def mean_of_pixels(supervised):
        def objective(params, model_state, batch, **options):
            sums, model_state = supervised(params, model_state, batch, **options)
            mean = batch.unlabelled.image.astype(jnp.float32).mean((1, 2, 3)).sum()
            return sums.with_scalars({"seen": mean / len(batch.unlabelled.mask)}), model_state

        return objective

    _, history = run(make_setup(objective=mean_of_pixels, devices=1, unlabelled_ratio=3))
    # 5 steps of 24 images are three epochs of 40.
    assert history.train["seen"][:5].mean() == pytest.approx(OTHERS.images.mean(), rel=1e-3)


@pytest.mark.slow
def test_labelled_and_unlabelled_images_grow_at_the_same_steps():
    growing = {"grow_from": 4, "grow_by": 2, "grow_start": "1 epoch", "grow_end": "2 epochs"}
    data = DataConfig(image_size=6, resize=6, crop="whole", augment=AugmentConfig(flip=False), **growing)
    options = {"data": data, "epochs": 3, "unlabelled": OTHERS, "objective": "fixmatch", "unlabelled_ratio": 3}
    setup = prepare_training(SmallNet(), few_labels(TABLE, 4), 2, SGD, 4, **options, strong_rand_augment=0)
    sides = [(batch.side, batch.unlabelled.side) for batch in setup.batches(0, 8)]
    assert [labelled == unlabelled for labelled, unlabelled in sides] == 8 * [True]
    assert len({labelled and labelled.pixels for labelled, _ in sides}) == 2
    assert int(run(setup)[0].step) == 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threshold": 1.01}, "threshold=1.01: expected 0 to 1"),
        ({"unlabelled_ratio": 6}, "unlabelled_ratio=6: a step takes 48 unlabelled images, and there are 40; lower it, "
         "or batch_size_per_device"),
        ({"unlabelled": None}, "objective=fixmatch needs images without labels; give unlabelled"),
        ({"unlabelled": 3}, "unlabelled=3: give a table of open_data(PATH), an ArrayTable(images, labels, class_names) "
         "or another source"),
        ({"unlabelled": random_table(40, image=8)}, "unlabelled data: images of (8, 8, 3), and images of (6, 6, 3) in "
         "the training data; give both the same shape"),
        ({"objective": 3}, "objective=3: give a function of the supervised objective, or a name"),
        ({"metrics": {"pseudo_labels": lambda logits, labels: logits[:, 0]}}, "objective=fixmatch already "
         "measures pseudo_labels; give the metric another name"),
        ({"data": DataConfig(labels_per_class=4)}, "data.labels_per_class=4: from Python, give the table that "
         "jaxddp.data.opening.few_labels makes")
    ]
)  # fmt: skip
def test_wrong_fixmatch_settings_raise_a_one_line_error(options, expected):
    with pytest.raises(InputError) as caught:
        make_setup(**options)
    assert str(caught.value) == expected


def test_images_unsuitable_for_rand_augment_are_rejected_before_compiling():
    tables = [ArrayTable(np.zeros((40, 6, 6, 4), np.uint8), np.arange(40) % 5, tuple("abcde")) for _ in range(2)]
    options = {"table": tables[0], "unlabelled": tables[1], "data": DataConfig(mean=(0.5,), std=(0.5,))}
    with pytest.raises(InputError, match="^strong_rand_augment=2: needs 8-bit pixels with 1 or 3 channels, and not"):
        make_setup(**options, strong_rand_augment=2)
    make_setup(**options)


def test_a_loss_that_is_divided_by_weights_is_refused(whole_run):
    def weighted(logits, labels):
        return jaxddp.softmax_cross_entropy(logits, labels).sum(), jnp.float32(len(labels))

    with pytest.raises(InputError, match="^objective=fixmatch averages the losses .*; leave loss.class_weights out,"):
        jaxddp.train(weighted, whole_run[0], listeners=())
    weighted_images = dataclasses.replace(random_table(50), weights=np.ones(50, np.float32))
    with pytest.raises(InputError, match="^objective=fixmatch averages over images, and the training images have"):
        jaxddp.train(jaxddp.softmax_cross_entropy, make_setup(table=weighted_images), listeners=())


@pytest.mark.ci
def test_fixmatch_runs_from_the_command_line(tmp_path, capfd):
    arrays = write_arrays(tmp_path / "set.npz", random_table(60, image=16), random_table(16, seed=1, image=16))
    words = [RECIPE, "--data.path", str(arrays), "--parallel.devices", "2", "--train.duration", "3 steps"]
    words += ["--data.labels-per-class", "2"]
    fixmatch = ["--objective.name", "fixmatch", "--objective.unlabelled-ratio", "2"]
    fixmatch += ["--objective.strong-rand-augment", "0"]
    work = ["--workdir", str(tmp_path / "run")]
    # The command fails before it creates the work directory.
    line = fails(["train", *words, *work, *fixmatch], capfd)
    assert line == "jaxddp: --objective.name fixmatch needs images without labels; give data.unlabelled"
    assert not (tmp_path / "run").exists()
    words += ["--data.unlabelled", "train"]
    assert main(["doctor", *words, *fixmatch, *work]) == 0
    assert "10 rows to train, 16 to validate, 60 without labels" in " ".join(capfd.readouterr().out.split())
    assert main(["train", *words, *work, *fixmatch, "--objective.threshold", "0.2"]) == 0
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {*ADDED_METRICS} <= lines[0].keys() and lines[-1]["split"] == "val" and lines[-1]["count"] == 16
    fingerprint = json.loads((tmp_path / "run" / "config.json").read_text())["fingerprint"]
    assert len({fingerprint[split] for split in ("train", "val", "unlabelled")}) == 3
    line = fails(["train", *words, *work], capfd)
    assert "objective.name was 'fixmatch' and is now 'supervised'; a resumed run" in line
