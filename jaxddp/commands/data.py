"""`jaxddp data check|show|pack`: look a data set over, see what the model sees, make a quicker copy."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxddp.commands.parse import parse
from jaxddp.config import Config, DataConfig, config_names, load
from jaxddp.errors import InputError
from jaxddp.wording import choices

if TYPE_CHECKING:
    from jaxddp.data.opening import Table


@dataclass(frozen=True)
class Check:
    """Read every image of a data set once: one line for each that cannot be used, a summary, and a manifest."""

    path: tyro.conf.Positional[str]
    """Where the data lie, as in data.path."""
    manifest: Path | None = None
    """Where what is known of every image goes, as JSON lines; PATH's name with .manifest.jsonl, here, unless given."""
    threads: int | None = None
    """Images that are looked at at once; twice the cores, 8 at least, unless given."""
    data_dir: str | None = None
    """Where tensorflow-datasets keeps its prepared sets."""
    train: str | None = None
    """The solution file of the training split; LOC_train_solution.csv unless given."""
    val: str | None = None
    """The solution file of the validation split; LOC_val_solution.csv unless given."""


@dataclass(frozen=True)
class Show:
    """Draw training images exactly as the model is given them at a step, with their labels."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    step: int = 1
    """Which step's batch, from 1."""
    count: int = 32
    """How many of its images, from the first."""
    out: Path = Path("show.png")
    """The picture to write."""


@dataclass(frozen=True)
class Pack:
    """Write a copy of a data set that is quicker to train on: images resized, in a few files; order and table stay."""

    path: tyro.conf.Positional[str]
    """Where the data lie, as in data.path."""
    out: Path
    """The directory to make; give it as data.path then."""
    short_side: int = 256
    """Pixels that an image's shorter side is brought down to."""
    quality: int = 90
    """Of the JPEG files that are written, 1 to 100."""
    data_dir: str | None = None
    """Where tensorflow-datasets keeps its prepared sets."""
    train: str | None = None
    """The solution file of the training split; LOC_train_solution.csv unless given."""
    val: str | None = None
    """The solution file of the validation split; LOC_val_solution.csv unless given."""


def run(arguments: list[str]) -> int:
    """Run one of the commands; returns the exit code.

    Raises:
        InputError: no such command, or whatever is wrong with what it is given.
    """
    commands = {"check": _check, "show": _show, "pack": _pack}
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        print("usage: jaxddp data check|show|pack ...; each has its --help")
        return 0
    if command not in commands:
        raise InputError(f"data: unknown command {command!r}; {choices(command, commands)}")
    return commands[command](arguments[1:])


def _check(arguments: list[str]) -> int:
    options = parse(Check, Check(tyro.MISSING), "jaxddp data check", arguments)
    from jaxddp.curate.check import check
    from jaxddp.curate.manifest import manifest_place, write_manifest
    from jaxddp.curate.progress_bar import ProgressBar

    tables = _open(options)
    place = manifest_place(Path(options.path), options.manifest)
    with ProgressBar(sum(map(len, tables.values()))) as display:
        report = check(tables, threads=options.threads, progress=display)
    write_manifest(report, place)
    print(*report.lines(), f"manifest: {place}", sep="\n")
    return int(report.num_faults > 0)


def _show(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        arguments = [config_names()[0], *arguments]
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"data show: the first argument is the config; there are: {', '.join(config_names())}")
    name, rest = arguments[0], arguments[1:]
    options = parse(Show, Show(load(name)), f"jaxddp data show {name}", rest)
    from jaxddp.curate.show import show

    print(f"{show(options.config, options.step, options.count, options.out)}: {options.out}")
    return 0


def _pack(arguments: list[str]) -> int:
    options = parse(Pack, Pack(tyro.MISSING, tyro.MISSING), "jaxddp data pack", arguments)
    from jaxddp.curate.pack import Packing, pack
    from jaxddp.curate.progress_bar import ProgressBar

    packing = Packing(options.short_side, options.quality)
    tables = _open(options)
    with ProgressBar(sum(map(len, tables.values()))) as display:
        manifest = pack(tables, options.out, packing, display)
    for split, written in manifest["splits"].items():
        size = sum(written["files"].values()) / 1e6
        print(f"{split}: {written['examples']:,} images, {size:,.1f} MB in {len(written['files'])} files")
    print(f"data.path: {options.out}")
    return 0


def _open(options: Check | Pack) -> "dict[str, Table]":
    from jaxddp.data.opening import open_splits

    data = DataConfig(path=options.path, data_dir=options.data_dir, train=options.train, val=options.val)
    return open_splits(data)
