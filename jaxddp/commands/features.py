"""`jaxddp features RUN|WEIGHTS DATA --out FILE`: write the activations of a layer for each image."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxddp.command_line.parse import OfRun, images_of, parse_network
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.commands.predict import check_output, topology_of
from jaxddp.core.errors import counted
from jaxddp.core.phases import counting_images, doing
from jaxddp.core.ranges import CpuDevices, Devices
from jaxddp.inference.predictions import FeatureFormat, format_of


@dataclass(frozen=True)
class _FeatureOptions:
    images: tyro.conf.Positional[tuple[str, ...]] = ()
    """A data set, as in data.path; or a folder, files, or a CSV file with a column `path`. Also as --data DATA."""
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
class Features(_FeatureOptions, OfRun):
    """Write the features of images in the network of a run or of weights, on all devices.

    For a file of weights, the network and the preprocessing are options: jaxddp features resnet50.safetensors photos
    --out photos.npz --model.name resnet50 --data.image-size 224. If the command is interrupted, the same command
    continues.
    """

    data_path: Annotated[str | None, tyro.conf.arg(name="data.path", aliases=["--data"])] = None
    """The images, in place of DATA."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options, place = parse_network(Features, "jaxddp features", arguments)
    images, form = images_of(options, options.images), format_of(options.out, FeatureFormat)
    check_output(options.out, images)
    with doing(IMPORTING):
        from jaxddp.data.opening import open_one_split
        from jaxddp.inference.output_files import write_features
        from jaxddp.inference.pretrained import trained_network
        from jaxddp.workdir.saved_state import recipe_of_run

        topology = topology_of(options)
    recipe = recipe_of_run(place) if isinstance(place, Path) else place
    table = open_one_split(images, recipe.config.data, options.split)
    network = trained_network(place, getattr(options, "step", ""), topology, table, needs_head=False)
    with counting_images("computing features", len(table)) as progress:
        more = {"layer": options.layer, "pool": options.pool, "progress": progress}
        errors = write_features(network, table, options.out, form, **more)
    if topology.peers.is_first:
        unusable = f", of which {errors:,} cannot be used" if errors else ""
        shape = "x".join(map(str, network.feature_shape(options.layer, options.pool)))
        print(f"{options.out}: {shape} features of {counted(len(table), 'image')}{unusable}, {network.origin}")
