"""`jaxddp weights [NAME]`: list the names of published weights; `jaxddp weights inspect FILE`: the arrays of a file."""

from dataclasses import dataclass

import tyro

from jaxddp.command_line.parse import parse
from jaxddp.command_line.terminal import IMPORTING, print_table
from jaxddp.core.errors import InputError, nearest
from jaxddp.core.phases import doing
from jaxddp.recipe.file import read_recipe
from jaxddp.weights.places import local_weights, published_weights


@dataclass(frozen=True)
class ListWeights:
    """List the published weights that --model.weights takes.

    The accuracy is the published one, for images of this size. The size is that of float32 parameters. The first
    weights of each network of a library also have the short name torchvision/NAME or timm/NAME.
    """

    name: tyro.conf.Positional[str | None] = None
    """A part of the names of the weights or of the network, such as resnet50 or timm/vit. If None, all are listed."""


@dataclass(frozen=True)
class InspectWeights:
    """List the arrays of a file of weights, and how their names map to the arrays of a network.

    A recipe's rename(name), or its table `rename` of regular expressions and their replacements, is applied.
    """

    file: tyro.conf.Positional[str] = tyro.MISSING
    """The weights, as in model.weights, but no run."""
    recipe: tyro.conf.Positional[str | None] = None
    """A recipe with the network. Without one, only the arrays are listed."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    if arguments[:1] == ["inspect"]:
        _inspect(parse(InspectWeights, InspectWeights(), "jaxddp weights inspect", arguments[1:]))
    else:
        _list((parse(ListWeights, ListWeights(), "jaxddp weights", arguments).name or "").lower())


def _inspect(options: InspectWeights) -> None:
    from jaxddp.weights.foreign import nearest_array
    from jaxddp.weights.state_dict import read

    if (path := local_weights(options.file)).is_dir():
        raise InputError(f"{path}: is a folder; give a file of weights, which `jaxddp export` writes of a run")
    stored = {name: (array, str([*array.shape]), array.dtype.name) for name, array in read(path).items()}
    if options.recipe is None:
        print_table(("name", "shape", "dtype"), [(name, *words) for name, (_, *words) in stored.items()])
        return
    file = read_recipe(options.recipe)
    with doing(IMPORTING):
        from jaxddp.inference.pretrained import mapped_names

    shapes, mapped = mapped_names(file, path)
    paths = {name: path for path, name in mapped.names.items()}
    rows = [
        (name, *words, paths.get(name, "not used"), mapped.layouts.get(paths.get(name, ""), ""))
        for name, (_, *words) in stored.items()
    ]
    print_table(("name", "shape", "dtype", "array of the network", "change"), rows)
    unused = {name: array for name, (array, *_) in stored.items() if name not in paths}
    for missing in sorted(shapes.keys() - mapped.names.keys()):
        near = nearest_array(missing, shapes[missing], unused)
        print(f"missing: {missing} {[*shapes[missing]]}{f', the nearest in the file is {near!r}' if near else ''}")


def _list(part: str) -> None:
    """Print the published weights. Raises: InputError if no name contains the part."""
    chosen = [one for one in published_weights() if part in one.name.lower() or part in one.network]
    if not chosen:
        known = {"inspect"} | {name for one in published_weights() for name in (one.network, one.family, one.name)}
        raise InputError(f"no weights have {part!r} in their names{nearest(part, known)}; omit the name")
    rows = []
    for one in chosen:
        figures = str(one.image_size), f"{one.parameters:g} M", f"{4 * one.parameters:.0f} MB"
        rows.append((one.name, one.network, "no head" if one.top1 is None else f"{one.top1:.2f}%", *figures))
    print_table(("weights", "network", "top-1", "pixels", "parameters", "size"), rows)
