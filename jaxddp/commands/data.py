"""`jaxddp data check|show|pack|split|get|sample`: check, draw, copy or divide a data set; fetch or write a set."""

from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro

from jaxddp.command_line.parse import ConfigOfRecipe, parse, parse_recipe
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.command_line.words import as_option, config_first
from jaxddp.config.data_section import TABLE_KEYS, DataConfig
from jaxddp.config.values import HELP, descriptions
from jaxddp.core.errors import InputError, JaxddpError, choices, counted, format_option, on_screen, size
from jaxddp.core.files import check_out
from jaxddp.core.phases import counting_images, doing
from jaxddp.core.ranges import Count, Range
from jaxddp.curate import PackOptions, check, manifest_path, pack, write_manifest

if TYPE_CHECKING:
    from jaxddp.data.faults import Refuse
    from jaxddp.data.source import Table


_TYPES, _DESCRIPTIONS = get_type_hints(DataConfig, include_extras=True), descriptions(DataConfig)
_KEYS = ("data_dir", "train", "val", "val_share", *TABLE_KEYS)
"""The keys of `data` that are options of these commands: how a data set is read."""
_OPTIONS = {f"data.{key}": format_option(key) for key in _KEYS} | {"data.path": "PATH"}


def _option(key: str) -> tuple[str, Any, Any]:
    """Return the field of a command for a key of `data`: its name, its type with its description, and its default."""
    kind: Any = Annotated[_TYPES[key], tyro.conf.arg(help=_DESCRIPTIONS[key])]
    return key, kind, field(default=getattr(DataConfig, key))


_Keys: Any = make_dataclass("_Keys", map(_option, _KEYS), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class DataOptions(_Keys):
    """Options that name the data set."""

    path: tyro.conf.Positional[str] = tyro.MISSING
    """The location of the data, as in data.path, or a name in datasets.toml."""


@dataclass(frozen=True, kw_only=True)
class CheckData(DataOptions):
    """Read every image of a data set.

    Prints a line for each row, file or record that cannot be used and a summary, and writes a manifest.
    """

    manifest: Path | None = None
    """The file to write, with a JSON line for every image; by default PATH's name with .manifest.jsonl, in the working
    directory."""
    threads: Annotated[int, Range(1, 1024)] | None = None
    """The number of images that are read at the same time; by default twice the cores, and at least 8."""


@dataclass(frozen=True)
class ShowData:
    """Draw the training images of a step exactly as the model receives them, with their labels.

    Example: jaxddp data show digits --data data/digits --step 100 --out show.png
    """

    config: ConfigOfRecipe
    step: Count = 1
    """The step whose batch is drawn; 1 is the first."""
    count: Annotated[int, Range(1, 100_000)] = 32
    """The number of images, beginning with the first image of the batch."""
    out: Path = Path("show.png")
    """The picture to write."""


@dataclass(frozen=True, kw_only=True)
class PackData(PackOptions, DataOptions):
    """Write a copy of a data set that trains faster, with resized images in a few files.

    The order of the examples and their labels stay the same.
    """

    out: Path = tyro.MISSING
    """The directory to create; give it as data.path to train on it."""


@dataclass(frozen=True, kw_only=True)
class SplitData(DataOptions):
    """Deal the training images of a data set to folds, and write a table of them.

    Each class is spread over the folds. All images of a group are in one fold.

    Example: jaxddp data split pets --folds 5 --out folds.csv
    """

    folds: Annotated[int, Range(2, 1000)] = 5
    """The number of folds."""
    out: Path | None = None
    """The CSV file to write; by default PATH's name with .folds.csv, in the working directory."""


@dataclass(frozen=True, kw_only=True)
class GetData:
    """Fetch a small published data set, and verify its files. Files that are there already are not fetched again.

    Example: jaxddp data get cifar10 --out data/cifar10
    """

    name: tyro.conf.Positional[str] = tyro.MISSING
    """The data set: "mnist" (12 MB), "fashion_mnist" (31 MB), "cifar10" (170 MB) or "cifar100" (169 MB)."""
    out: Path = tyro.MISSING
    """The directory of the files; give it as data.path to train on it."""


@dataclass(frozen=True, kw_only=True)
class SampleData:
    """Write a small sample data set, without a download."""

    name: tyro.conf.Positional[str] = "digits"
    """The data set: "digits", handwritten digits of 32x32 pixels in ImageNet's layout, which need scikit-learn."""
    out: Path = tyro.MISSING
    """The directory to create; give it as data.path to train on it."""


def run(arguments: list[str]) -> int | None:
    """Run a subcommand, and return the exit code. Raises: InputError."""
    commands = {"check": _check, "show": _show, "pack": _pack, "split": _split, "get": _get, "sample": _sample}
    command, *rest = arguments or [""]
    if command in HELP:
        print("usage: jaxddp data check|show|pack|split|get|sample ...; each command has its own --help")
        return 0
    if command not in commands:
        raise InputError(f"data: unknown command {command!r}; {choices(command, commands)}")
    try:
        return commands[command](rest)
    except JaxddpError as error:
        if command != "show":
            error.change_keys(lambda key: replace(key, rendered=_OPTIONS.get(key.name) and as_option(key, _OPTIONS)))
        raise


def _check(arguments: list[str]) -> int:
    options = parse(CheckData, CheckData(), "jaxddp data check", arguments)
    faults = list[str]()

    def report_fault(fault: str) -> None:
        # A file that both splits use is read twice.
        if (line := str(InputError(fault))) not in faults:
            faults.append(line)
            print(line, flush=True)

    tables = _open(options, report_fault)
    manifest = manifest_path(Path(str(_config(options).path)), options.manifest)
    with counting_images("checking images", sum(map(len, tables.values()))) as progress:
        report = check(tables, refused=faults, threads=options.threads, progress=progress)
    write_manifest(report, manifest)
    print(*map(on_screen, [*report.lines(), f"manifest: {manifest}"]), sep="\n")
    return int(report.num_faults > 0)


def _show(arguments: list[str]) -> None:
    options, file = parse_recipe(ShowData, "jaxddp data show", config_first(arguments))
    with doing(IMPORTING):
        from jaxddp.setup.input_figure import show
        from jaxddp.setup.run_setup import open_recipe

    print(f"{show(open_recipe(file), options.step, options.count, options.out)}: {options.out}")


def _pack(arguments: list[str]) -> None:
    options = parse(PackData, PackData(), "jaxddp data pack", arguments)
    tables = _open(options)
    with counting_images("packing images", sum(map(len, tables.values()))) as progress:
        manifest = pack(tables, options.out, options, progress)
    for split, written in manifest["splits"].items():
        files = f"{size(sum(written['files'].values()))} in {counted(len(written['files']), 'file')}"
        print(f"{split}: {counted(written['examples'], 'image')}, {files}")
    print(f"data.path: {options.out}")


def _split(arguments: list[str]) -> None:
    options = parse(SplitData, SplitData(), "jaxddp data split", arguments)
    from jaxddp.data.division import write_folds
    from jaxddp.data.opening import open_one_split

    data = _config(options)
    out = check_out(options.out or Path(f"{Path(options.path).stem}.folds.csv"))
    counts = write_folds(open_one_split([str(data.path)], data, "train"), options.folds, out, data)
    print(*(f"fold {fold}: {counted(count, 'image')}" for fold, count in enumerate(counts)), sep="\n")
    print(f"data.path: {out}, with data.split_column fold and data.val_fold 0 to {options.folds - 1}")


def _get(arguments: list[str]) -> None:
    options = parse(GetData, GetData(), "jaxddp data get", arguments)
    from jaxddp.data.published import get_published

    print(f"data.path: {get_published(options.name, options.out)}")


def _sample(arguments: list[str]) -> None:
    options = parse(SampleData, SampleData(), "jaxddp data sample", arguments)
    from jaxddp.data.sample import write_sample

    print(f"data.path: {write_sample(options.name, options.out)}")


def _open(options: DataOptions, report_fault: "Refuse | None" = None) -> "dict[str, Table]":
    """Open the splits of the data set. Faults are passed to `report_fault`. Without it, the first fault is raised."""
    from jaxddp.data.faults import raise_fault
    from jaxddp.data.opening import open_splits

    return open_splits(_config(options), report_fault or raise_fault, undivided=report_fault is not None)


def _config(options: DataOptions) -> DataConfig:
    from jaxddp.data.storage.root import find_dataset

    place = find_dataset(options.path)
    return place.completed(DataConfig(path=place.path, **{key: getattr(options, key) for key in _KEYS}))
