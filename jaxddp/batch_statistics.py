"""Parse and check `model.batch_norm`: the images over which batch norm computes its statistics in training."""

import re
from dataclasses import dataclass

from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted, nearest

_GHOST = re.compile("ghost:([1-9][0-9]{0,7})")


@dataclass(frozen=True)
class BatchStatistics:
    """The images over which batch norm computes its statistics: by default all images of a device.

    Attributes:
        axis_name: the mesh axis over which statistics are averaged, for the statistics of the global batch.
        group: the number of consecutive images that are normalized together, the ghost batch of Hoffer et al. 2017
            (arXiv:1705.08741). Such statistics are the same on any number of devices.
    """

    axis_name: str | None = None
    group: int | None = None

    @classmethod
    def parse(cls, text: str) -> "BatchStatistics":
        """Parse "local", "sync" or "ghost:K".

        Raises:
            InputError: the text is none of these forms. The message suggests the nearest one.
        """
        named = {"local": cls(), "sync": cls(axis_name="data")}
        if isinstance(text, str) and text in named:
            return named[text]
        if isinstance(text, str) and (ghost := _GHOST.fullmatch(text)):
            return cls(group=int(ghost[1]))
        kind, _, number = str(text).partition(":")
        with_prefix = [f"ghost:{number}"] if _GHOST.fullmatch(f"ghost:{number}") else []
        suggestion = "" if kind == "ghost" else nearest(str(text), [*named, *with_prefix])
        raise InputError(
            Key("model.batch_norm", text),
            f": expected 'local', 'sync' or 'ghost:K' (K images are normalized together, 1 to 99,999,999){suggestion}",
        )

    def check(self, batch_size: int, shares: int) -> None:
        """Check that each part of the global batch consists of complete groups.

        Args:
            batch_size: a multiple of `shares`.
            shares: the number of equal parts into which devices, shards and microbatches divide the batch.

        Raises:
            InputError: a part is not a multiple of the group. The message names batch and group sizes that fit.
        """
        share = batch_size // shares
        if self.group is None or share % self.group == 0:
            return
        whole = self.group * shares
        below = batch_size // whole * whole
        fitting = ", ".join(str(size) for size in (below, below + whole) if size > 0)
        group = max(size for size in range(1, min(self.group, share) + 1) if share % size == 0)
        raise InputError(
            Key.plain("model.batch_norm", f"ghost:{self.group}"),
            f" normalizes {counted(self.group, 'image')} together, but ",
            Key("train.batch_size", batch_size),
            f" is computed in {counted(shares, 'part')} of {share}",
            advice=f"a batch of {fitting}, or ghost:{group}, would do",
        )
