"""`jaxddp push RUN hf://OWNER/NAME`: upload a run's weights and a model card to the Hugging Face Hub."""

from dataclasses import dataclass

import tyro

from jaxddp.command_line.parse import RunDirectory, parse
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing


@dataclass(frozen=True)
class Push:
    """Upload the weights of a checkpoint to a repository of the Hugging Face Hub.

    The commit holds the weights with the names of torchvision or timm (model.safetensors), the settings and the classes
    (config.json, signature.json), a model card (README.md), and the curves (curves.png). It holds no paths of this
    machine. --model.weights hf://OWNER/NAME reads such a repository. `jaxddp export --format hub` writes the same files
    to a folder.
    """

    run: tyro.conf.Positional[RunDirectory] = tyro.MISSING
    """The work directory of the run."""
    place: tyro.conf.Positional[str] = tyro.MISSING
    """The repository, hf://OWNER/NAME. It is created if it does not exist."""
    private: bool = False
    """Make a new repository private."""
    step: str = "best"
    """The checkpoint: latest, best, or its step. Without validations, best is the latest."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError, Unreachable."""
    options = parse(Push, Push(), "jaxddp push", arguments)
    from jaxddp.weights.download import SCHEME, HubFile, check_token

    place = HubFile.parse(options.place, options.place) if options.place.startswith(SCHEME) else None
    if place is None or place.file is not None or place.revision is not None:
        raise InputError(f"{options.place}: not a repository of the Hub; write {SCHEME}OWNER/NAME")
    check_token(place)
    with doing(IMPORTING):
        from jaxddp.inference.published import push_run

    print(push_run(options.run, options.step, place, private=options.private))
