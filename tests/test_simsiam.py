"""SimSiam: its loss is the paper's on any number of devices, and its features are measured and used later."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import random_batch, random_table, write_arrays
from support.networks import SmallNet, fresh_state, largest_difference, objective_of, train_steps
from support.runs import fails, metrics
from support.shared import sgd, topology_of

import jaxddp
from jaxddp.augment.geometry import area_crop
from jaxddp.cli import main
from jaxddp.config import AugmentConfig
from jaxddp.engine.ways.way import Way
from jaxddp.metrics import vote_of_neighbours
from jaxddp.models.adapt import Adapted
from jaxddp.models.projection import Projection
from jaxddp.objectives.simsiam import OUTPUT_STD, SimSiam, _folded, _unit
from jaxddp.workdir.saved_state import restore_state

PROJECTION = Projection(projector_layers=2, projector_width=6, predictor_width=4)
RECIPE = str(Path(__file__).parent / "recipes" / "small_recipe.py")
TABLE, VAL = random_table(50, image=16), random_table(20, seed=4, image=16)
OBJECTIVE = ["--objective.name", "simsiam", "--objective.projector-width", "8"]


def made(net, axis_name=None):
    """Return SimSiam's objective for a network in float64, and the supervised one."""
    simsiam = SimSiam(PROJECTION, axis_name)
    supervised = objective_of(net, augment=AugmentConfig(pad=1))
    # The wrapper of LoRA's adapters, here of none, does not hide the head.
    network = Adapted(simsiam.network(supervised.model, (6, 6, 3)), {}, 1, 1.0)
    supervised = type(supervised)(network, supervised.loss, supervised.preprocess)
    return simsiam(supervised), supervised


def by_hand(params, outputs, targets=None):
    """Return the loss and the z of two views from their features in plain NumPy or JAX. With targets, z is constant."""

    def normed(x, kernel, name=""):
        x = x @ kernel
        x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return jnp.maximum(x * params[f"{name}_scale"] + params[f"{name}_bias"], 0) if name else x

    kernels, units = [params[f"Dense_{number}"]["kernel"] for number in range(4)], []
    for x in outputs:
        z = normed(normed(x, kernels[0], "projector_0"), kernels[1])
        p = normed(z, kernels[2], "predictor") @ kernels[3] + params["Dense_3"]["bias"]
        units.append([each / jnp.linalg.norm(each, axis=1, keepdims=True) for each in (z, p)])
    (z1, p1), (z2, p2) = units
    of_first, of_second = targets or (z1, z2)
    return -((p1 * of_second).sum(1) + (p2 * of_first).sum(1)).mean() / 2, (z1, z2)


@pytest.mark.parametrize("masked", [0, 5])
def test_the_loss_and_its_gradient_equal_the_papers(masked):
    """Padding has no influence, and z has no gradient."""
    batch, key = random_batch(16, masked=masked), jax.random.key(3)
    with jax.enable_x64(True):
        objective, supervised = made(SmallNet(dtype=jnp.float64))
        params = jax.device_get((state := fresh_state(supervised, sgd(0.1), topology_of(1))).params)
        view = jax.jit(lambda key: supervised.preprocess(batch, train=True, key=key).images[: 16 - masked])
        views = [view(_folded(key, number)) for number in range(2)]
        assert (np.asarray(views[0]) != np.asarray(views[1])).any((1, 2, 3)).mean() > 0.5

        def loss(params):
            sums, _ = objective(params, state.model_state, batch, train=True, image_key=key)
            return sums.values[0, 0] / sums.values[0, 1], sums

        def features(params, images):
            conv = params["Conv_0"]
            x = jax.lax.conv(images.transpose(0, 3, 1, 2), conv["kernel"].transpose(3, 2, 0, 1), (1, 1), "SAME")
            return jnp.maximum(x + conv["bias"][:, None, None], 0).mean((2, 3))

        def expected(params, targets=None):
            return by_hand(params["simsiam"], [features(params, images) for images in views], targets)

        (value, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        exact, targets = jax.jit(expected)(params)
        own = {name: params[name] for name in ("Conv_0", "simsiam")}
        exact_gradient = jax.jit(jax.grad(lambda params: expected(params, targets)[0]))(own)
        std = (targets[0].std(0) * 6**0.5).mean()
    assert value == pytest.approx(float(exact), abs=1e-9) and sums.count() == 16 - masked
    assert sums.means()[OUTPUT_STD] == pytest.approx(float(std), abs=1e-9)
    assert largest_difference({name: gradient[name] for name in own}, exact_gradient) < 1e-9
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient["Dense_0"]))
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient["Conv_0"])) > 1e-4
    # If all hidden units of the predictor are 0, so is p.
    assert not jax.grad(lambda p: _unit(p).sum())(jnp.zeros((1, 3))).any()


@pytest.mark.slow
def test_simsiam_gives_the_same_result_on_any_number_of_devices():
    """Train three steps of plain SGD in float64. The last examples of each batch are padding."""
    results, batches = [], [random_batch(16, seed=number, masked=5) for number in range(3)]
    with jax.enable_x64(True):
        objective, supervised = made(SmallNet(batch_norm=True, sync="data", dtype=jnp.float64), "data")
        for topology in map(topology_of, (1, 4)):
            _, sums, state = train_steps(supervised, Way(topology), batches, jax.random.key(4), minimized=objective)
            results.append((state.params, state.model_state, [each.means() for each in sums]))
    assert largest_difference(*results) < 1e-9


def words_of(folder, workdir, *more):
    return [RECIPE, f"--data.path={folder}/set.npz", "--parallel.devices=2", "--workdir", f"{folder / workdir}", *more]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of eight steps, which was interrupted after four, and of a whole run."""
    folder = tmp_path_factory.mktemp("simsiam")
    write_arrays(folder / "set.npz", TABLE, VAL)
    for workdir, steps in (("whole", 8), ("run", 4), ("run", 8)):
        more = ["--optimizer.schedule", "constant", "--checkpoint.best", "val knn_accuracy"]
        assert main(["train", *words_of(folder, workdir, *OBJECTIVE, *more, "--train.duration", f"{steps} steps")]) == 0
    return folder


def test_a_resumed_run_ends_with_the_same_bits(run):
    whole, resumed = (restore_state(run / name, "latest", topology_of(1)) for name in ("whole", "run"))
    assert int(resumed.step) == 8 and largest_difference(whole, resumed) == 0 and "simsiam" in whole.params


def test_a_validation_is_the_vote_of_the_features_of_training_images(run):
    """The loss of the validation is exact on any number of devices."""
    trained = jaxddp.load_run(run / "run", "latest", devices=1)
    train, val = (trained.features(table.images) for table in (TABLE, VAL))
    votes, own = (vote_of_neighbours(val, *each) for each in ((train, TABLE.labels, 50), (val, VAL.labels, 20)))
    *_, last = metrics(run / "run")
    assert (own == VAL.labels).mean() != last["knn_accuracy"] == (votes == VAL.labels).mean() > 0.3
    assert last["count"] == 20 and last.keys() & {"loss", "top1", "top5", OUTPUT_STD} == {"loss"}


def test_the_network_of_a_run_initializes_a_supervised_run(run, capfd):
    more = ["--train.duration", "1 step", "--optimizer.learning-rate", "1e-9", "--optimizer.warmup", "0 steps"]
    assert main(["train", *words_of(run, "tuned", "--model.weights", str(run / "run"), *more)]) == 0
    before, after = (jaxddp.load_run(run / name, "best", devices=1).state.params for name in ("run", "tuned"))
    assert largest_difference(before["Conv_0"], after["Conv_0"]) < 1e-6
    assert main(["export", str(run / "run"), "--out", str(hub := run / "hub"), "--format", "hub"]) == 0
    assert "Its head is not trained." in (hub / "README.md").read_text()
    predict, out = [["predict", str(run / place)] for place in ("run", "hub")], ["--out", str(run / "p.csv")]
    for command in (["eval", *words_of(run, "run")], *([*words, RECIPE, *out] for words in predict)):
        assert "trains no head; take `jaxddp features`, or train a head with --model.weights" in fails(command, capfd)


def test_mixed_images_and_images_of_each_process_are_refused(run, capfd):
    mixed = "does not mix images, and --data.augment.mixup 0.2 is set; leave it out"
    local = "with --data.placement local: a validation compares the images of all processes"
    for word, message in (("augment.mixup=0.2", mixed), ("placement=local", local)):
        words = ["train", *words_of(run, "refused", *OBJECTIVE), f"--data.{word}"]
        assert f"--objective.name simsiam {message}" in fails(words, capfd)


def test_a_crop_shows_a_part_of_the_image_of_the_drawn_size():
    """A ramp from left to right and a ramp from top to bottom show the position and the size of each area."""
    rows, columns = np.mgrid[:64, :64].astype(np.float32)
    image = jnp.stack([rows, columns, 0 * rows], -1)
    keys = jax.random.split(jax.random.key(0), 200)
    crops = np.asarray(jax.jit(jax.vmap(lambda key: area_crop(key, image)))(keys))
    height, width = (np.diff(ramp)[:, 16:48].mean(1) for ramp in (crops[:, :, 32, 0], crops[:, 32, :, 1]))
    areas = height * width
    assert 0.2 <= areas.min() < 0.25 and 0.9 < areas.max() <= 1 and 0.74 < (height / width).min() < 0.85
    assert crops.min() >= 0 and crops.max() <= 63 and np.std(crops[:, 0, 0, 0]) > 5 and 0.5 < areas.mean() < 0.57
    pixels = np.asarray(jax.jit(jax.vmap(lambda key: area_crop(key, image.astype(jnp.uint8))))(keys))
    assert pixels.dtype == np.uint8 and np.abs(pixels - crops).max() <= 0.55
