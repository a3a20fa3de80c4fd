"""`jaxddp weights [NAME]`: list the names of published weights that `model.weights` takes. It needs no network."""

from dataclasses import dataclass

import tyro

from jaxddp.command_line.parse import parse
from jaxddp.command_line.terminal import print_table
from jaxddp.core.errors import InputError, nearest
from jaxddp.weights.places import published_weights


@dataclass(frozen=True)
class ListWeights:
    """List the published weights that --model.weights takes.

    The accuracy is the published one, for images of this size. The size is that of float32 parameters. The first
    weights of each network of a library also have the short name torchvision/NAME or timm/NAME.
    """

    name: tyro.conf.Positional[str | None] = None
    """A part of the names of the weights or of the network, such as resnet50 or timm/vit. If None, all are listed."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError if no name contains the part."""
    part = (parse(ListWeights, ListWeights(), "jaxddp weights", arguments).name or "").lower()
    chosen = [one for one in published_weights() if part in one.name.lower() or part in one.network]
    if not chosen:
        known = {name for one in published_weights() for name in (one.network, one.family, one.name)}
        raise InputError(f"no weights have {part!r} in their names{nearest(part, known)}; omit the name")
    rows = []
    for one in chosen:
        figures = str(one.image_size), f"{one.parameters:g} M", f"{one.megabytes:.0f} MB"
        rows.append((one.name, one.network, f"{one.top1:.2f}%", *figures))
    print_table(("weights", "network", "top-1", "pixels", "parameters", "size"), rows)
