"""`jaxddp data check|show|pack|sample`: check a data set, show what the model sees, copy it, write one to try."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxddp.command_line.parse import ConfigOfRecipe, parse, parse_recipe
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing
from jaxddp.core.ranges import Count, Range
from jaxddp.core.wording import choices, counted, on_screen, size
from jaxddp.curate.pack import PackOptions, pack
from jaxddp.keys import HELP
from jaxddp.recipe_file import config_names
from jaxddp.sections.data_section import DataConfig, HeldOut

if TYPE_CHECKING:
    from jaxddp.data.faults import Refuse
    from jaxddp.data.source import SourceTable


@dataclass(frozen=True, kw_only=True)
class DataPlace:
    """The data set that a command reads."""

    path: tyro.conf.Positional[str] = tyro.MISSING
    """Where the data are, as in data.path, or their name in datasets.toml."""
    data_dir: str | None = None
    """Where tensorflow-datasets keeps its prepared sets."""
    train: str | None = None
    """The solution file of the training split; LOC_train_solution.csv unless given."""
    val: str | None = None
    """The solution file of the validation split; LOC_val_solution.csv unless given."""
    val_share: HeldOut | None = None
    """Where there is no validation split: the share of each class to take for it."""


@dataclass(frozen=True, kw_only=True)
class CheckData(DataPlace):
    """Read a data set once: a line for each row, file or record that cannot be used, a summary, and a manifest."""

    manifest: Path | None = None
    """The file of JSON lines about every image; PATH's name with .manifest.jsonl, here, unless given."""
    threads: Annotated[int, Range(1, 1024)] | None = None
    """Images that are read at once; twice the cores, at least 8, unless given."""


@dataclass(frozen=True)
class ShowData:
    """Draw training images exactly as the model is given them at a step, with their labels.

    Example: jaxddp data show digits --data data/digits --step 100 --out show.png
    """

    config: ConfigOfRecipe
    step: Count = 1
    """Which step's batch, from 1."""
    count: Annotated[int, Range(1, 100_000)] = 32
    """How many of its images, from the first."""
    out: Path = Path("show.png")
    """The picture to write."""


@dataclass(frozen=True, kw_only=True)
class PackData(PackOptions, DataPlace):
    """Write a copy of a data set that is quicker to train on: images resized, in a few files; order and table stay."""

    out: Path = tyro.MISSING
    """The directory to make; give it as data.path then."""


@dataclass(frozen=True, kw_only=True)
class SampleData:
    """Write a small data set to try jaxddp on, without a download."""

    name: tyro.conf.Positional[str] = "digits"
    """Which: "digits", handwritten ones of 32x32 pixels in ImageNet's layout; they need scikit-learn."""
    out: Path = tyro.MISSING
    """The directory to make; give it as data.path then."""


def run(arguments: list[str]) -> int:
    """Run one of the commands; returns the exit code. Raises: InputError."""
    commands = {"check": _check, "show": _show, "pack": _pack, "sample": _sample}
    command = arguments[0] if arguments else ""
    if command in HELP:
        print("usage: jaxddp data check|show|pack|sample ...; each has its --help")
        return 0
    if command not in commands:
        raise InputError(f"data: unknown command {command!r}; {choices(command, commands)}")
    return commands[command](arguments[1:])


def _check(arguments: list[str]) -> int:
    options = parse(CheckData, CheckData(), "jaxddp data check", arguments)
    from jaxddp.curate.check import check
    from jaxddp.curate.manifest_writer import manifest_place, write_manifest
    from jaxddp.curate.progress_bar import ProgressBar

    # By their lines: what both splits need is read for each.
    refused: dict[str, None] = {}

    def refuse(fault: str) -> None:
        if (line := str(InputError(fault))) not in refused:
            refused[line] = None
            print(line, flush=True)

    tables = _open(options, refuse)
    place = manifest_place(Path(options.path), options.manifest)
    with ProgressBar(sum(map(len, tables.values()))) as display:
        report = check(tables, refused=[*refused], threads=options.threads, progress=display)
    write_manifest(report, place)
    print(*map(on_screen, [*report.lines(), f"manifest: {place}"]), sep="\n")
    return int(report.num_faults > 0)


def _show(arguments: list[str]) -> int:
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in HELP):
        raise InputError(f"data show: the first argument is the config; there are: {', '.join(config_names())}")
    options, file = parse_recipe(ShowData, "jaxddp data show", arguments)
    with doing(IMPORTING):
        from jaxddp.curate.show import show
        from jaxddp.setup.prepare import open_experiment

    print(f"{show(open_experiment(file), options.step, options.count, options.out)}: {options.out}")
    return 0


def _pack(arguments: list[str]) -> int:
    options = parse(PackData, PackData(), "jaxddp data pack", arguments)
    from jaxddp.curate.progress_bar import ProgressBar

    tables = _open(options)
    with ProgressBar(sum(map(len, tables.values()))) as display:
        manifest = pack(tables, options.out, options, display)
    for split, written in manifest["splits"].items():
        held = f"{size(sum(written['files'].values()))} in {counted(len(written['files']), 'file')}"
        print(f"{split}: {counted(written['examples'], 'image')}, {held}")
    print(f"data.path: {options.out}")
    return 0


def _sample(arguments: list[str]) -> int:
    options = parse(SampleData, SampleData(), "jaxddp data sample", arguments)
    from jaxddp.data.sample import write_sample

    print(f"data.path: {write_sample(options.name, options.out)}")
    return 0


def _open(options: DataPlace, refuse: "Refuse | None" = None) -> "dict[str, SourceTable]":
    from jaxddp.data.faults import at_once
    from jaxddp.data.opening import open_splits
    from jaxddp.data.storage.catalog import place_of

    place, given = place_of(options.path), {key: getattr(options, key) for key in ("data_dir", "val_share")}
    splits = {key: getattr(options, key) or getattr(place, key) for key in ("train", "val")}
    data = DataConfig(path=place.path, classes=place.classes, **splits, **given)
    return open_splits(data, refuse or at_once)
