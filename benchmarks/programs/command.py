"""The command-line interface of `gpu_program.py` and `tpu_program.py`."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from benchmarks.common.harness import Figures, machine
from benchmarks.programs.config_step import Data
from jaxddp.command_line.parse import parse_recipe
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.recipe.file import RecipeFile

ProgramFigures = Callable[..., Figures]
"""(recipe, topology, images on each device, data, **switches) -> figures of the compiled program."""


@dataclass(frozen=True)
class Overrides:
    """The config, with overrides from the command line."""

    config: Annotated[Config, tyro.conf.arg(name="")]


def main(
    script: str,
    description: str | None,
    topologies: Sequence[str],
    program_figures: ProgramFigures,
    table: Callable[[Mapping[str, Figures]], str],
    switches: Mapping[str, str] | None = None,
) -> None:
    """Run the command: counts one program for each topology, prints the table and writes the figures as JSON.

    Args:
        script: Name of the script.
        description: Text of `--help`.
        topologies: Default of `--topology`.
        program_figures: Compiles and counts one program. It raises InputError for a bad config or topology.
        table: Formats the figures by topology.
        switches: Names and help of further options without a value. `program_figures` receives them by name.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="name or file of a config")
    parser.add_argument("--topology", nargs="+", default=topologies)
    parser.add_argument("--batch", type=int, help="images on each device (default: the batch size of the config)")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes of the data")
    parser.add_argument("--examples", type=int, default=50_000, help="number of training examples")
    parser.add_argument("--channels", type=int, default=3, help="channels of the images")
    parser.add_argument("--out", type=Path, default=Path(f"runs/benchmarks/{Path(script).stem}.json"))
    for name, text in (switches or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    options, overrides = parser.parse_known_args()
    jax.config.update("jax_platforms", "cpu")
    try:
        _, file = parse_recipe(Overrides, script, [options.config, *overrides])
        data = Data(options.examples, options.classes, options.channels)
        chosen = {name: getattr(options, name) for name in switches or {}}
        results = {name: program_figures(file, name, options.batch, data, **chosen) for name in options.topology}
    except InputError as error:
        print(f"{script}: {error}", file=sys.stderr)
        sys.exit(2)
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    first, *others = options.topology
    report |= results[first] | {"others": {name: results[name] for name in others}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{table(results)}\n\nresults: {options.out}")


def config_for(file: RecipeFile, images: int | None, num_devices: int) -> tuple[Config, int]:
    """Return the config with `images` on each device, in bfloat16 by default, and the number of images.

    Args:
        images: None for the config's batch size on each device.
    """
    images = file.config.train.batch_size if images is None else images
    config = file.config.replace(train={"batch_size": images * num_devices})
    if config.train.precision is None:
        config = config.replace(train={"precision": "bfloat16"})
    return config, images


def find_devices(topology: str, describe: Callable[[str], list[Any]], examples: str) -> list[Any]:
    """Return the described devices of a topology.

    Raises:
        InputError: The compiler does not know the topology. The message has the examples.
    """
    try:
        return describe(topology)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--topology {topology}: {reason}; give one such as {examples}") from None


def memory_figures(compiled: Any) -> Figures:
    """Return the bytes of a compiled program's arguments and temporaries, and those updated in place."""
    memory = compiled.memory_analysis()
    return {
        "aliased_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }
