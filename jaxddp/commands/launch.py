"""`jaxddp launch -- COMMAND`: start a command in several processes of this machine."""

from jaxddp.cluster.launcher import Launch, launch, split
from jaxddp.commands.parse import parse


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code of the first process that failed. Raises: as `launch`."""
    own, command = split(arguments)
    return launch(parse(Launch, Launch(), "jaxddp launch", own), command)
