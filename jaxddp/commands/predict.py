"""`jaxddp predict RUN|WEIGHTS IMAGES --out FILE`: classify images with a trained network."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxddp.command_line.parse import OfRun, images_of, parse_network
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.config import ParallelConfig
from jaxddp.config.tree import Views
from jaxddp.core.errors import InputError, counted
from jaxddp.core.phases import counting_images, doing
from jaxddp.core.ranges import CpuDevices, Devices, Factor, HeldOut, Range, Share
from jaxddp.inference.predictions import PredictionFormat, format_of
from jaxddp.sweeps.folder import runs_and_images

if TYPE_CHECKING:
    from jaxddp.mesh import Topology


def topology_of(options: Any) -> "Topology":
    """Join the job, and return the devices that the options of a command choose. Raises: InputError."""
    from jaxddp.job.environment import find_job
    from jaxddp.mesh import Topology
    from jaxddp.setup.resources import join_job

    return Topology.create(options.devices, join_job(find_job(), ParallelConfig(cpu_devices=options.cpu_devices)))


def check_output(out: Path, images: Iterable[str]) -> None:
    """Raise `InputError` if the file that a command writes is one of the images that it reads."""
    if os.path.realpath(out) in map(os.path.realpath, images):
        raise InputError(f"{out}: is one of the images; give another --out")


@dataclass(frozen=True)
class _PredictOptions:
    images: tyro.conf.Positional[tuple[str, ...]] = ()
    """Further runs, whose probabilities are averaged with those of the first; a sweep of folds or seeds stands for its
    runs. Then the images: a folder, files, a CSV file (with the run's data.columns), or a directory with
    LOC_sample_submission.csv. Also as --data IMAGES."""
    out: Path = tyro.MISSING
    """The file to write."""
    weights: tuple[Factor, ...] = ()
    """With several runs, the weight of each in the mean of their probabilities. By default, all are equal."""
    top: Annotated[int, Range(1, 100_000)] = 5
    """The number of classes for each image, the most probable first; all classes if there are fewer."""
    format: PredictionFormat | None = None
    """csv, jsonl or parquet: a row for each image. kaggle: the submission file of the ImageNet localization challenge,
    with the whole image as every box. By default the extension of FILE names the format."""
    min_confidence: Share | None = None
    """Write "unknown" as the class of an image whose most probable class has a smaller probability."""
    coverage: HeldOut | None = None
    """Also write the column `set`: the classes among which is the right one, for at least this share of images. The
    run's validation data decide how probable a class in a set must be (split conformal prediction)."""
    raw: bool = False
    """Write the probabilities without the temperature of `jaxddp eval RUN --calibrate`."""
    guard_formulas: bool = False
    """In csv, write an apostrophe before an id, a class or an error that begins with =, +, -, @, a tab or a line break.
    Without this option a spreadsheet reads such values as formulas."""
    explain: Path | None = None
    """With one run: a folder for a PNG file of each image, with a heat map of the pixels that its predicted class
    depends on (Grad-CAM)."""
    devices: Devices | None = None
    """The number of devices to use; all by default."""
    cpu_devices: CpuDevices | None = None
    """The number of CPU devices to simulate in each process."""


@dataclass(frozen=True)
class PredictImages(_PredictOptions, OfRun):
    """Classify images with the network of a run or of weights, or with several runs, on all devices.

    If the command is interrupted, the same command continues.
    """

    data_path: Annotated[str | None, tyro.conf.arg(name="data.path", aliases=["--data"])] = None
    """The images, in place of IMAGES."""
    eval_views: Annotated[Views | None, tyro.conf.arg(name="eval.views")] = None
    """Test-time augmentation, in place of that of each run."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options, place = parse_network(PredictImages, "jaxddp predict", arguments)
    places, words = [place], options.images
    if isinstance(place, Path):
        places, words = runs_and_images(place, words)
    if options.weights and (len(options.weights) != len(places) or not any(options.weights)):
        given = " ".join(f"{weight:g}" for weight in options.weights)
        raise InputError(f"--weights {given}: give a weight for each of {counted(len(places), 'run')}, not all 0")
    images = images_of(options, words)
    form = options.format or format_of(options.out, PredictionFormat, ", or give --format")
    if options.guard_formulas and form != "csv":
        raise InputError(f"--guard-formulas: applies to csv only, and {options.out} is {form}; leave it out")
    if form == "kaggle" and (options.min_confidence, options.coverage) != (None, None):
        raise InputError("--format kaggle: --min-confidence and --coverage do not apply; leave them out")
    is_one_run = len(places) == 1 and isinstance(place, Path)
    if options.coverage is not None and not is_one_run:
        raise InputError("--coverage: needs one run, whose validation data decide about the sets; leave it out")
    if options.explain is not None and len(places) > 1:
        given = counted(len(places), "run")
        raise InputError(f"--explain: draws on which pixels one network depends, and here are {given}; leave it out")
    check_output(options.out, images)
    with doing(IMPORTING):
        from jaxddp.data.opening import open_inputs
        from jaxddp.inference.calibrated import calibrated, threshold_of
        from jaxddp.inference.output_files import write_predictions
        from jaxddp.inference.pretrained import trained_network
        from jaxddp.inference.trained import Ensemble
        from jaxddp.workdir.saved_state import recipe_of_run

        topology = topology_of(options)
    with doing("looking for the images"):
        recipe = recipe_of_run(places[0]) if isinstance(places[0], Path) else places[0]
        table = open_inputs(images, recipe.config.data)
    members = [trained_network(each, getattr(options, "step", ""), topology, table) for each in places]
    if (views := getattr(options, "eval_views", None)) is not None:
        members = [replace(each, config=each.config.replace(eval={"views": views})) for each in members]
    trained = Ensemble.of(members, options.weights)
    if is_one_run and not options.raw:
        trained = calibrated(trained)
    least = options.coverage and threshold_of(trained, options.coverage)
    more = {name: getattr(options, name) for name in ("top", "min_confidence", "guard_formulas", "explain")}
    with counting_images("classifying images", len(table)) as progress:
        errors = write_predictions(trained, table, options.out, form, **more, set_threshold=least, progress=progress)
    if topology.peers.is_first:
        unusable = f", of which {errors:,} cannot be used" if errors else ""
        sets = f", sets of classes with a probability of at least {least:.4g}" if least is not None else ""
        print(f"{options.out}: {counted(len(table), 'image')}{unusable}, {trained.origin}{sets}")
