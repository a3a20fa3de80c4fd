"""Loads the initial weights of a run, and applies the keys that set single layers, such as `model.freeze`."""

import functools
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxddp.config import Config
from jaxddp.config.layers import ADAPTERS, HEADS, NO_LAYERS, Layers, has_prefix, longest_match
from jaxddp.core.errors import InputError, Key, about, counted, listed
from jaxddp.engine.optimizer import only_trained, thawing, with_factors
from jaxddp.engine.parts.guard import GradientNorm
from jaxddp.kernels import Kernels
from jaxddp.mesh import Topology
from jaxddp.models.adapt import Adapted, with_frozen_norms
from jaxddp.models.interface import PARAMS, ImageShape, Model, by_path, shapes_of, trees_of
from jaxddp.models.network import Naming, layer_decays
from jaxddp.recipe.file import read_config
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.setup.network_checks import check_head
from jaxddp.setup.recipe import Recipe, method_of
from jaxddp.weights.foreign import Foreign, Rename, in_terms_of, renamed
from jaxddp.weights.match import ImageArrays, Shapes, dotted_path, has_published_names, match, namings_of, unwrapped
from jaxddp.weights.places import WEIGHTS_FILE
from jaxddp.weights.state_dict import read
from jaxddp.workdir.saved_state import read_run
from jaxddp.workdir.signature import Signature

_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class WeightsTarget:
    """The network that receives weights.

    Attributes:
        class_ids: the ids of its classes; empty if they are not known.
        image_shape: the shape of its images, [H, W, C], to which arrays are converted.
        new_layers: layers that keep their initial values, except for a head; see `initial_weights`.
        needs_head: whether a head for other classes is an error.
        rename: a recipe's function from the names in a file to those of the network.
    """

    model: Model
    image_shape: ImageShape
    num_classes: int
    class_ids: tuple[str, ...] = ()
    new_layers: Layers = NO_LAYERS
    needs_head: bool = False
    rename: Rename | None = None

    @functools.cached_property
    def shapes(self) -> Shapes:
        """The shapes of the network's arrays by path."""
        return shapes_of(self.model, self.image_shape)


def stored_arrays(
    path: Path, stored: Mapping[str, np.ndarray], target: WeightsTarget
) -> tuple[Foreign, Sequence[Naming]]:
    """Return the arrays that a file of weights stores under names of the network, and the namings that find them.

    The names of a network that torchvision or timm publish are those of the library; see `jaxddp.weights.foreign` for
    those of another network. A recipe's `rename`, which may be wrong (InputError), is applied before.
    """
    namings = namings_of(target.model)
    with about(path):
        if len(namings) == 1:
            return in_terms_of(target.shapes, stored, target.rename), namings
        names = unwrapped(renamed(stored, target.rename), target.shapes, namings)
    return Foreign({new: stored[name] for name, new in names.items()}, {}, {}), namings


def signature_of_weights(path: Path) -> Signature | None:
    """Return the classes and the images of weights of a run, or of a folder with a pushed run; None for others."""
    if os.path.isdir(path):  # False if the name is too long; `Path.is_dir` raises an error.
        return Signature.read(path)
    # `jaxddp push` writes the signature beside a file of weights.
    is_pushed = path.name == WEIGHTS_FILE and os.path.isfile(path.parent / CONFIG_FILE)
    return Signature.read(path.parent) if is_pushed else None


def initial_weights(
    path: Path, target: WeightsTarget, topology: Topology, stored: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays of a weights file, or of a run in its work directory, that fit a network, by path.

    The head of a run, or of a repository to which a run was pushed, is skipped if its classes differ from the target's.
    A new head of a network with published names starts at zero. Arrays for images of another size or with other
    channels are converted to those for images of the target. A line is logged if layers keep their initial values
    (`new_layers`), the head is new, or arrays of the file are converted or not used.

    Args:
        stored: the arrays of the file, if it was read before.

    Raises: InputError if the weights cannot be read, are not finite, are of another network (the message lists missing
    arrays and wrong shapes), have an untrained head where the target needs one, or differ between processes.
    """
    if os.path.isdir(path):
        _, arrays = read_run(path, "best", topology)
        foreign, namings = Foreign({dotted_path(name): array for name, array in arrays.items()}, {}, {}), (dotted_path,)
    else:
        foreign, namings = stored_arrays(path, read(path) if stored is None else stored, target)
    signature = signature_of_weights(path)
    if signature is not None and target.needs_head:
        folder = path if os.path.isdir(path) else path.parent
        check_head(read_config(folder / CONFIG_FILE)[0], folder)
    has_other_classes = signature is not None and bool(target.class_ids) and signature.class_ids != target.class_ids
    if has_other_classes and target.needs_head:
        raise InputError(f"{path}: its classes differ from those of the data; give data with the same classes")
    images = ImageArrays.of(target.model, target.image_shape, signature.image_shape if signature is not None else None)
    heads = {"new_head": has_other_classes, "needs_head": target.needs_head}
    with about(path):
        matched = match(
            target.shapes, foreign.arrays, namings, target.num_classes, target.new_layers, **heads, images=images
        )
    crc = 0
    for name, array in sorted(matched.arrays.items()):
        if not np.isfinite(array).all():
            raise InputError(f"{path}: {name} is not finite, as after an overflow in float16; give other weights")
        crc = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), crc))
    topology.peers.agree({"the weights to start from": f"{crc:08x}"})
    classes = counted(target.num_classes, "other class" if has_other_classes else "class")
    differences = {
        "new": matched.new,
        f"a new head for {classes}": matched.head,
        "converted": [f"{name} ({each.description})" for name, each in matched.conversions.items()],
        "not used": matched.left_over,
        "converted layouts": foreign.told,
    }
    told = "; ".join(f"{name}: {listed(arrays)}" for name, arrays in differences.items() if arrays)
    if topology.peers.is_first and told:
        _log.info(f"{path}: {len(matched.arrays)} of the network's {counted(len(target.shapes), 'array')}; {told}")
    # A new head starts at zero, because the initial kernels of EfficientNets for few classes give large logits, which a
    # fine-tuning does not make up for (Kolesnikov et al. 2020, "Big transfer", arXiv:1912.11370, also starts at zero).
    # The head of a user's network may need another value, for example if it divides by the norm of its kernel.
    zeros = matched.head if has_published_names(target.model) else ()
    # The arrays are compared before they are converted, because processors may round conversions differently.
    return matched.converted() | {path: np.zeros(target.shapes[path], np.float32) for path in zeros}


def fine_tuned(recipe: Recipe, shapes: Shapes) -> Recipe:
    """Return the recipe with an optimizer and a model that freeze, unfreeze and scale layers as its config specifies.

    The norm by which gradients are clipped counts the layers that a step trains. Weight decay per layer is part of the
    optimizer; see `jaxddp.kernels`. `shapes` are those of the network's arrays, by path. Raises: InputError if a layer
    does not exist, no layer is left to train, or two keys contradict each other.
    """
    config, optimizer, plan = recipe.config, recipe.optimizer, recipe.layout.plan
    trained, unfreeze_times = _trained(config, shapes, recipe.kernels), config.model.unfreeze_times
    starts = {layer: duration.steps(**plan.lengths) for layer, duration in unfreeze_times.items()}
    decays = layer_decays(recipe.model, trained, config.optimizer.layer_decay)
    factors = {name: longest_match(config.optimizer.layer_rate_factors, name, 1.0) * decays[name] for name in trained}
    if config.frozen:
        optimizer = only_trained(optimizer, config.frozen)
    if any(value != 1 for value in factors.values()):
        optimizer = with_factors(optimizer, factors)
    first_steps = {name: int(longest_match(starts, name, 0)) for name in trained}
    if any(starts.values()):
        optimizer = thawing(optimizer, first_steps)
    steps = {name: step if factors[name] else None for name, step in first_steps.items()}
    untrained = tuple((name, step) for name, step in steps.items() if step != 0)
    parts = [replace(part, first_steps=untrained) if isinstance(part, GradientNorm) else part for part in recipe.parts]
    model = with_frozen_norms(recipe.model, config.frozen_norms)
    return replace(recipe, optimizer=optimizer, model=model, parts=tuple(parts))


def as_trained(model: Model, recipe: Recipe) -> Model:
    """Return a network with the layers that the recipe's objective adds, and adapters if `model.lora` is set.

    The adapters are those of its frozen dense kernels. Raises: InputError if no such kernel is chosen, one is smaller
    than the rank, or the objective does not accept the network.
    """
    config, kernels, image_shape = recipe.config, recipe.kernels, recipe.layout.training_data.image_shape
    if (extend := method_of(recipe.objective, "network")) is not None:
        model = extend(model, image_shape)
    if (rank := config.model.lora) is None:
        return model
    key, layers = Key("model.lora", rank), config.model.adapted
    params, _ = trees_of(model, image_shape)
    if not isinstance(params, Mapping) or ADAPTERS in params:
        raise InputError(key, f": the network's parameters must be a dict without the key {ADAPTERS!r}")
    shapes = {name: leaf.shape for name, leaf in by_path((), params).items()}
    frozen = [name for name in shapes if name in config.frozen]
    if len(frozen) == len(shapes) and config.model.freeze is None:
        advice = "name the trained layers: ", Key.plain("model.freeze", "all but LAYER")
        raise InputError(key, f": the network has no layer called {' or '.join(HEADS)}", advice=advice)
    layers.check(shapes, "model.lora_layers")
    chosen = [name for name in frozen if name in layers or not layers]
    of_chosen = {name: kernels.matrix(name, shapes[name]) for name in chosen}
    matrices = {name: matrix for name, matrix in of_chosen.items() if matrix is not None}
    if not matrices:
        given = Key("model.lora_layers", config.model.lora_layers) if layers else key
        advice = "name other layers, or leave it out"
        raise InputError(given, ": no frozen layer has a kernel of attention or of a dense layer", advice=advice)
    smallest = min(matrices, key=lambda name: min(matrices[name][-2:]))
    inputs, outputs = matrices[smallest][-2:]
    if rank > min(inputs, outputs):
        advice = f"give at most {min(inputs, outputs)}, or name other layers in ", Key("model.lora_layers")
        raise InputError(key, f": the kernel {smallest} is a matrix of {inputs}x{outputs}", advice=advice)
    return Adapted(model, matrices, rank, config.model.lora_alpha / rank)


def _trained(config: Config, shapes: Shapes, kernels: Kernels) -> list[str]:
    """Return the names of the trained parameters. Raises: see `fine_tuned`."""
    names = [path.removeprefix(PARAMS) for path in shapes if path.startswith(PARAMS)]
    settings, model = config.optimizer.layer_settings, config.model
    if not names:
        raise InputError("model: the network has no parameters, so nothing can be trained; give it a layer with some")
    of_trained = {
        "model.unfreeze": model.unfreeze_times,
        "optimizer.rate_factors": config.optimizer.layer_rate_factors.keys() - settings.rates.keys(),
        "optimizer.groups": settings.rates | settings.decays,
    }
    others = {"model.freeze": model.frozen.prefixes if model.freeze else (), "optimizer.groups": settings.frozen}
    others["model.new_layers"] = model.fresh_layers.prefixes
    for key, layers in (*others.items(), *of_trained.items()):
        Layers(tuple(layers)).check(names, key)
    trained = [name for name in names if name not in config.frozen]
    freezing_key = Key("optimizer.groups")
    if model.freeze:
        freezing_key = Key.plain("model.freeze", model.freeze)
    elif model.lora:
        freezing_key = Key("model.lora", model.lora)
    if not trained:
        raise InputError(freezing_key, ": no layer is left to train", advice="leave one out")
    for key, layers in of_trained.items():
        for layer in layers:
            if not any(has_prefix(layer, name) for name in trained):
                by_model = any(has_prefix(layer, name) and name in model.frozen for name in names)
                by = freezing_key if by_model else Key("optimizer.groups")
                raise InputError(Key(key), f": {layer!r} is frozen by ", by)
    for layer, decay in settings.decays.items():
        layer_names = [name for name in trained if has_prefix(layer, name)]
        if not any(kernels.get(name, shapes[PARAMS + name]) for name in layer_names):
            problem = f": {layer}:decay={decay:g}: batch norm and biases are never decayed"
            raise InputError(Key("optimizer.groups"), problem, advice="leave it out")
    return trained
