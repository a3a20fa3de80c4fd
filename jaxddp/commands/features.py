"""`jaxddp features RUN|WEIGHTS DATA --out FILE`: write the activations of a layer for each image."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from jaxddp.command_line.parse import ConfigOfRecipe, RunDirectory, parse, parse_weights
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.commands.predict import check_output, topology_of
from jaxddp.core.errors import counted
from jaxddp.core.phases import counting_images, doing
from jaxddp.core.ranges import CpuDevices, Devices
from jaxddp.inference.predictions import FeatureFormat, format_of


@dataclass(frozen=True)
class _FeatureOptions:
    out: Path = tyro.MISSING
    """The file to write: .npz, which NumPy reads, or .parquet."""
    layer: str | None = None
    """The name of a module of the network, whose output is written, such as layer3_0/conv2, or layer3.0.conv2 as in
    published weights. By default, the features that the head reads."""
    pool: Literal["mean", "none"] = "mean"
    """mean: average the output of the layer over the pixels of an image. none: write it as it is."""
    split: Literal["train", "val"] | None = None
    """The split of a data set. By default, the validation split, or all images if the data set has none."""
    devices: Devices | None = None
    """The number of devices to use; all by default."""
    cpu_devices: CpuDevices | None = None
    """The number of CPU devices to simulate in each process."""


@dataclass(frozen=True)
class FeaturesOfRun(_FeatureOptions):
    """Write the features of images in the network of a run or of a file of weights, on all devices.

    In place of RUN, weights can be given as in model.weights. For a file, the network and the preprocessing are
    options: jaxddp features resnet50.safetensors photos --out photos.npz --model.name resnet50 --data.image-size 224.
    If the command is interrupted, the same command continues.
    """

    run: tyro.conf.Positional[RunDirectory] = tyro.MISSING
    """The work directory of the run; or a file or a name of weights."""
    data: tyro.conf.Positional[tuple[str, ...]] = tyro.MISSING
    """A data set, as in data.path; or a folder, files, or a CSV file with a column `path`."""
    step: str = "best"
    """The checkpoint: latest, best, or its step. Without validations, best is the latest."""


@dataclass(frozen=True)
class FeaturesOfWeights(_FeatureOptions):
    """Write the features of images in the network of a file of weights, on all devices.

    The keys of a config that describe the network and its images are options.
    """

    config: ConfigOfRecipe = tyro.MISSING
    data: tyro.conf.Positional[tuple[str, ...]] = tyro.MISSING
    """A data set, as in data.path; or a folder, files, or a CSV file with a column `path`."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options = _parse(arguments)
    form = format_of(options.out, FeatureFormat)
    check_output(options.out, options.data)
    with doing(IMPORTING):
        from jaxddp.data.opening import open_one_split
        from jaxddp.inference.output_files import write_features
        from jaxddp.inference.trained import network_of_weights, restore_run
        from jaxddp.workdir.saved_state import recipe_of_run

        topology = topology_of(options)
    if isinstance(options, FeaturesOfRun):
        table = open_one_split(options.data, recipe_of_run(options.run).config.data, options.split)
        network = restore_run(options.run, options.step, topology)
        of = f"step {network.step} of {options.run}"
    else:
        table = open_one_split(options.data, options.config.data, options.split)
        network = network_of_weights(options.config, table, topology)
        of = str(options.config.model.weights)
    with counting_images("computing features", len(table)) as progress:
        more = {"layer": options.layer, "pool": options.pool, "progress": progress}
        errors = write_features(network, table, options.out, form, **more)
    if topology.peers.is_first:
        unusable = f", of which {errors:,} cannot be used" if errors else ""
        shape = "x".join(map(str, network.feature_shape(options.layer, options.pool)))
        print(f"{options.out}: {shape} features of {counted(len(table), 'image')}{unusable}, {of}")


def _parse(arguments: list[str]) -> FeaturesOfRun | FeaturesOfWeights:
    """Parse the arguments. The first one is a run if it is a folder without a file of weights, and weights otherwise.

    Raises: InputError.
    """
    from jaxddp.weights.places import file_of_folder

    first = arguments[0] if arguments else ""
    if first.startswith("-") or not first or os.path.isdir(file_of_folder(Path(first))):
        return parse(FeaturesOfRun, FeaturesOfRun(), "jaxddp features", arguments)
    return parse_weights(FeaturesOfWeights, "jaxddp features", arguments)[0]
