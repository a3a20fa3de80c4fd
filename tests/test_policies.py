"""Augmentation policies: operations and tables beside torchvision's and Pillow's, and the distribution of draws."""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps
from support.cases import essential_and_rare
from support.data import random_batch, random_table
from support.networks import linear_model
from support.runs import setup_of
from support.shared import sgd
from support.torchvision_golden import FILE, decoded, image

import jaxddp.augment.operations as operations
import jaxddp.augment.policies as policies
from jaxddp.augment.preprocess import _MIX, _STREAMS, _THEN, Preprocess, check_augmentation
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.config.registry import POLICIES
from jaxddp.core.errors import InputError

GOLDEN = json.loads(FILE.read_text())
PHOTO = image()
HEIGHT, WIDTH, _ = PHOTO.shape
AUTO = ("auto_augment_cifar10", "auto_augment_imagenet", "auto_augment_svhn")
NAMES = ("augmix", *AUTO, "three_augment", "trivial_augment")
JITTER = (0.4, 0.3, 0.2, 0.1)


def planes(pixels: np.ndarray) -> jax.Array:
    return jnp.moveaxis(jnp.array(pixels), -1, 0)


def pixels_of(planes: jax.Array) -> np.ndarray:
    return np.moveaxis(np.array(planes), 0, -1)


def keys(number: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), number)


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """Return how far counts are from their expected values, in standard deviations of chi-square."""
    expected = counts.sum() * np.asarray(shares) / np.sum(shares)
    assert (expected >= 5).all()
    degrees = len(expected) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.fixture(scope="module")
def run():
    program = jax.jit(lambda parameters: operations.operate(planes(PHOTO), operations.PixelOperation(*parameters)))
    return lambda name, magnitude: pixels_of(program(jnp.array(operations.row(name, magnitude), jnp.int32)))


@pytest.fixture(scope="module")
def adjust():
    return jax.jit(lambda which, amount: operations.adjusted(planes(PHOTO), which, amount))


@pytest.mark.parametrize("case", GOLDEN["operations"])
def test_an_operation_equals_torchvisions(case, run, adjust):
    """A warp by nearest neighbour may choose another pixel where the source is on a border between two pixels."""
    *kind, value = case.split()
    name, magnitude = kind[-1], float(value)
    if kind[0] == "jitter":
        which = ("brightness", "contrast", "saturation").index(name)
        ours = pixels_of(adjust(which, round(operations.ONE * (magnitude - 1))))
    elif name == "hue":
        ours = pixels_of(adjust(3, round(operations.TURN * magnitude)))
    elif name == "grayscale":
        ours = np.moveaxis(
            np.broadcast_to(operations.gray_of(planes(PHOTO).astype(jnp.int32)), (3, HEIGHT, WIDTH)), 0, -1
        )
    else:
        ours = run(name, magnitude)
    theirs = decoded(GOLDEN["operations"][case])
    difference = np.abs(ours.astype(int) - theirs)
    if name in ("rotate", "shear_x", "shear_y"):
        assert (difference.max(-1) > 0).mean() < 0.02
    else:
        assert difference.max() <= 1
    changes = not (name == "identity" or (magnitude == 0 and name in ("posterize",)))
    assert (theirs != PHOTO).any() == changes


@pytest.mark.parametrize("radius", [0.1, 0.8, 2.0])
def test_a_blur_equals_pillows(radius):
    noise = np.random.default_rng(1).integers(0, 256, (23, 17, 3), np.uint8)
    for pixels in (noise, PHOTO):
        ours = pixels_of(operations.blur(planes(pixels), jnp.array(operations.box_weights(radius), jnp.uint32)))
        assert (ours == np.array(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))).all()
        assert radius == 0.1 or (ours != pixels).any()


SPACES = {
    "trivial_augment": policies.wide_space(),
    "auto_augment": policies.learned_space((HEIGHT, WIDTH)),
    "augmix": policies.mixing_space((HEIGHT, WIDTH)),
}


@pytest.mark.parametrize("name", SPACES)
def test_the_magnitudes_of_a_policy_equal_torchvisions(name):
    space, theirs = SPACES[name], GOLDEN["spaces"][name]
    assert theirs.keys() - space.keys() == {"invert"} & theirs.keys()
    for operation in theirs.keys() & space.keys():
        ours, (magnitudes, is_signed) = space[operation], theirs[operation]
        assert (operation in operations.SIGNED) == is_signed
        drawn = len(ours)
        expected = magnitudes[:drawn] if isinstance(magnitudes, list) else drawn * [magnitudes]
        np.testing.assert_allclose(ours, expected, atol=6e-5)
        if operation in ("solarize", "posterize", "translate_x", "translate_y"):
            # These parameters are whole numbers, which must not depend on the rounding of a magnitude.
            assert [operations.row(operation, each) for each in ours] == [
                operations.row(operation, each) for each in expected
            ]
    assert len(space["rotate"]) == (policies.SEVERITY if name == "augmix" else len(theirs["rotate"][0]))


def test_the_sub_policies_equal_torchvisions():
    for name, table in policies.TABLES.items():
        ours = [[list(choice) for choice in pair] for pair in table]
        assert ours == GOLDEN["policies"][name.removeprefix("auto_augment_")]


def results_of(name: str, number: int) -> list[bytes]:
    apply = POLICIES.get(name)(AugmentConfig(policy=name))
    results = np.array(jax.jit(jax.vmap(lambda key: apply(key, jnp.array(PHOTO))))(keys(number)))
    assert results.dtype == np.uint8 and results.shape == (number, *PHOTO.shape)
    return [result.tobytes() for result in results]


def outcomes_of(chains: np.ndarray) -> list[bytes]:
    """Return the results of chains of operations, int[n, length, parameters]."""
    chain = operations.PixelOperation(*jnp.moveaxis(jnp.array(chains, jnp.int32), -1, 0))
    results = jax.jit(jax.vmap(lambda one: operations.operate_all(planes(PHOTO), one)))(chain)
    return [pixels_of(result).tobytes() for result in results]


def check_shares(results: list[bytes], shares: Mapping[bytes, float]) -> None:
    """Check that all results are possible, and that they occur with their shares. Rare outcomes are one outcome."""
    counts = Counter(results)
    assert counts.keys() <= shares.keys()
    rare = [outcome for outcome, share in shares.items() if share * len(results) < 5]
    table = [(counts[outcome], share) for outcome, share in shares.items() if outcome not in rare]
    if (rest := sum(shares[outcome] for outcome in rare)) * len(results) >= 5:
        table.append((sum(counts[outcome] for outcome in rare), rest))
    assert len(table) > 10 and chi_square(*np.array(table).T) < 4


@pytest.mark.slow
def test_trivial_augment_draws_operation_magnitude_and_direction_uniformly():
    space = policies.wide_space()
    tables = [np.array(operations.rows(space, name)) for name in operations.OPERATIONS]
    assert {table.shape[:2] for table in tables} == {(31, 2)}
    shares = defaultdict(float)
    for outcome in outcomes_of(np.concatenate(tables).reshape(-1, 1, tables[0].shape[-1])):
        shares[outcome] += 1 / (len(operations.OPERATIONS) * 62)
    check_shares(results_of("trivial_augment", 2000), shares)


@pytest.mark.slow
@pytest.mark.parametrize("name", essential_and_rare(("cifar10",), "imagenet", "svhn"))
def test_auto_augment_draws_sub_policies_and_uses_operations_with_their_probabilities(name):
    space = policies.learned_space((HEIGHT, WIDTH))
    chains, chances = [], []
    for pair in GOLDEN["policies"][name]:
        cases = []
        for operation, probability, index in pair:
            both = operations.rows(space, operation)[index if operation in space else 0]
            cases.append([(operations.IDENTITY, 1 - probability), *((each, probability / 2) for each in both)])
        for (first, one), (second, other) in itertools.product(*cases):
            chains.append([first, second])
            chances.append(one * other / 25)
    shares = defaultdict(float)
    for outcome, chance in zip(outcomes_of(np.array(chains)), chances, strict=True):
        shares[outcome] += chance
    possible = {outcome: share for outcome, share in shares.items() if share > 0}
    check_shares(results_of(f"auto_augment_{name}", 3000), possible)


def test_augmix_draws_chains_of_one_to_three_operations():
    number = 3000
    chains = jax.jit(jax.vmap(lambda key: policies.draw_chains(key, (HEIGHT, WIDTH))))(keys(number))
    table = np.stack([np.array(field) for field in chains], -1)
    space = policies.mixing_space((HEIGHT, WIDTH))
    possible = {each for name in space for pair in operations.rows(space, name) for each in pair}
    assert {*map(tuple, table[(table != np.array(operations.IDENTITY)).any(-1)].tolist())} <= possible
    # The first operation of a chain is always drawn; some rows of its table are the identity.
    names = np.array(chains.operation)[:, :, 0].ravel()
    counts = np.bincount(names, minlength=len(operations.OPERATIONS))
    assert {operations.OPERATIONS[index] for index in np.flatnonzero(counts)} == {*space}
    assert chi_square(counts[counts > 0], np.ones(len(space))) < 4
    # 2/3 of the chains have a second operation, and 1/3 a third.
    drawn = (np.array(chains.operation) != operations.OPERATIONS.index("identity")).mean((0, 1))
    assert drawn[0] == 1 and np.abs(drawn - [1, 2 / 3, 1 / 3]).max() < 4 * 0.5 / np.sqrt(3 * number)


def test_augmix_draws_weights_from_its_distributions():
    drawn = np.array(jax.jit(jax.vmap(policies.draw_weights))(keys(10_000)), np.float64) / policies.UNIT**2
    assert (drawn.sum(1) == 1).all()
    share = 1 - drawn[:, 0]
    assert chi_square(np.histogram(share, 20, (0, 1))[0], np.ones(20)) < 4
    of_chains = drawn[share > 0, 1:] / share[share > 0, None]
    # One component of Dirichlet(1, 1, 1) has the distribution Beta(1, 2), whose cumulative function is 1 - (1 - x)**2.
    edges = np.linspace(0, 1, 11)
    for component in of_chains.T:
        assert chi_square(np.histogram(component, edges)[0], np.diff(1 - (1 - edges) ** 2)) < 4
    assert np.abs(np.array(np.corrcoef(of_chains, rowvar=False))[0, 1:] + 0.5).max() < 0.03


def test_a_mixture_is_the_weighted_mean_of_the_image_and_of_its_chains():
    names = [("autocontrast", "rotate", "identity"), ("solarize", "identity", "identity"), ("shear_x",) * 3]
    chains = [[operations.row(name, 20.0 if name == "rotate" else 0.2) for name in chain] for chain in names]
    parts = [np.frombuffer(part, np.uint8).reshape(PHOTO.shape) for part in outcomes_of(np.array(chains))]
    weights = np.array([0.3, 0.35, 0.25, 0.1])
    units = np.round(weights * policies.UNIT**2).astype(np.uint32)
    parameters = operations.PixelOperation(*jnp.moveaxis(jnp.array(chains, jnp.int32), -1, 0))
    mixed = pixels_of(jax.jit(policies.mixture)(planes(PHOTO), parameters, jnp.array(units)))
    exact = sum(weight * part for weight, part in zip(weights, [PHOTO, *parts], strict=True))
    assert np.abs(mixed - exact).max() <= 0.5 + 1e-4
    # White stays white, with the largest sum that must fit into 32 bits.
    white = jnp.full((3, 4, 4), 255, jnp.uint8)
    same = operations.PixelOperation(*(jnp.broadcast_to(jnp.int32(field), (3, 3)) for field in operations.IDENTITY))
    assert (policies.mixture(white, same, jnp.array(units)) == 255).all()


@pytest.mark.slow
def test_three_augment_draws_one_of_three_and_a_radius(monkeypatch):
    monkeypatch.setattr(policies, "JITTER", (0.0, 0.0, 0.0, 0.0))
    picture = Image.fromarray(PHOTO)
    outcomes = defaultdict(float)
    outcomes[np.array(ImageOps.grayscale(picture).convert("RGB")).tobytes()] += 1 / 3
    outcomes[np.array(ImageOps.solarize(picture, 128)).tobytes()] += 1 / 3
    weights = jnp.array([operations.box_weights(radius) for radius in policies.RADII], jnp.uint32)
    assert policies.RADII[0] == 0.1 and policies.RADII[-1] == 2 and len(policies.RADII) == 191
    for blurred in jax.jit(jax.vmap(lambda each: operations.blur(planes(PHOTO), each)))(weights):
        outcomes[pixels_of(blurred).tobytes()] += 1 / 3 / 191
    check_shares(results_of("three_augment", 3300), outcomes)


def test_color_jitter_draws_its_order_and_amounts_uniformly():
    order, amounts = jax.jit(jax.vmap(lambda key: operations.draw(key, JITTER, [0, 1, 3])))(keys(4000))
    counts = Counter(map(tuple, np.array(order).tolist()))
    assert counts.keys() == {*itertools.permutations([0, 1, 3])}
    assert chi_square(np.array([*counts.values()]), np.ones(6)) < 4
    for index, strength in enumerate(JITTER):
        shares = np.array(amounts)[:, index] / (operations.TURN if index == 3 else operations.ONE) / strength
        assert np.abs(shares).max() <= 1 + 1e-4
        assert chi_square(np.histogram(shares, 20, (-1.001, 1.001))[0], np.ones(20)) < 4
    assert np.abs(np.corrcoef(np.array(amounts), rowvar=False) - np.eye(4)).max() < 0.08


def test_color_jitter_applies_its_steps_in_the_drawn_order():
    apply = jax.jit(lambda key: operations.color_jitter(key, planes(PHOTO), JITTER))
    step = jax.jit(operations.adjusted)
    for key in keys(6, seed=3):
        (order, amounts), expected = operations.draw(key, JITTER, [0, 1, 2, 3]), planes(PHOTO)
        for which in order:
            expected = step(expected, which, amounts[which])
        assert (np.array(apply(key)) == np.array(expected)).all()
    assert operations.mean_of(jnp.full((1, 3000, 3001), 250)) == 250


@pytest.mark.slow
@pytest.mark.parametrize(
    "augment",
    essential_and_rare(({"rand_augment": 1},), *({"policy": name} for name in NAMES), {"color_jitter": JITTER}),
    ids=str,
)
def test_a_draw_depends_on_the_example_and_not_on_its_place_or_on_other_augmentations(augment):
    batch = random_batch(16, image=12)
    apply = jax.jit(lambda batch, settings: Preprocess(augment=settings)(batch, train=True).images, static_argnums=1)
    settings = AugmentConfig(flip=False, **augment)
    images, places = np.array(apply(batch, settings)), np.random.default_rng(1).permutation(16)
    shuffled = jax.tree.map(lambda column: column[places], batch)
    assert (images[places] == np.array(apply(shuffled, settings))).all()
    for other in (batch._replace(epoch=batch.epoch + 1), batch._replace(row=batch.row + 1)):
        assert (images != np.array(apply(other, settings))).any((1, 2, 3)).mean() > 0.6
    # A flip alone does not change these images, because each is its own mirror image.
    mirrored = batch._replace(image=np.maximum(batch.image, batch.image[:, :, ::-1]))
    flipping = AugmentConfig(flip=True, **augment)
    assert (np.array(apply(mirrored, settings)) == np.array(apply(mirrored, flipping))).all()


def test_random_streams_have_the_numbers_of_earlier_releases():
    numbers = {"flip": 0, "pad": 1, "rand_augment": 2, "cutout": 3, "erase": 4, "policy": 8, "color_jitter": 9}
    assert (numbers, 5, 6) == (_STREAMS, _MIX, _THEN)


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_takes_images_with_one_or_three_channels_of_8_bits(name):
    preprocess = Preprocess(augment=AugmentConfig(policy=name))
    for shape in [(16, 16, 3), (16, 12, 1), (1, 2, 3)]:
        check_augmentation(preprocess, shape)
    for channels, dtype in ((4, "uint8"), (3, "uint16")):
        with pytest.raises(InputError) as error:
            check_augmentation(preprocess, (16, 16, channels), jnp.dtype(dtype))
        wanted = f"needs 8-bit pixels with 1 or 3 channels, and not {dtype}[16,16,{channels}]; leave it out"
        assert str(error.value) == f"data.augment.policy={name!r}: {wanted}"


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (
            {"policy": "augmix", "rand_augment": 2},
            "data.augment.policy='augmix' with data.augment.rand_augment=2: an image is changed by one policy only",
        ),
        ({"alternate_flip": True}, "data.augment: flip and alternate_flip are both set; set one of them to false"),
        (
            {"policy": "three_augment", "color_jitter": JITTER},
            "data.augment.color_jitter=(0.4, 0.3, 0.2, 0.1): data.augment.policy=three_augment has color jitter of its "
            "own; set one of them",
        ),
        (
            {"color_jitter": (0.4, 0.4, 0.4, 0.6)},
            "data.augment.color_jitter=(0.4, 0.4, 0.4, 0.6): the strength of the hue, the last number, is at most 0.5, "
            "which is half a turn; give 0.5 for any hue",
        ),
    ],
)
def test_settings_that_do_not_work_together_are_refused_before_compiling(augment, message):
    with pytest.raises(InputError) as error:
        data = DataConfig(augment=AugmentConfig(**augment))
        setup_of(linear_model(), sgd(0.1), random_table(20), data=data)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
