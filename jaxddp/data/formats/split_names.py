"""Chooses the splits of a data set that has a name for each split, such as `test`."""

from collections.abc import Iterable, Mapping, Sequence

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import nearest
from jaxddp.data.source import Split


def split_name(
    where: object, splits: Iterable[str], split: Split, data: DataConfig, usual: Mapping[Split, Sequence[str]]
) -> str | None:
    """Return the name of a split in a data set; None if it has none.

    Args:
        where: the data set, for messages.
        splits: the names of the splits that the data set has.
        data: the config; `data.train` and `data.val` name splits.
        usual: the names of each split if the config names none; the first that exists is used.

    Raises: InputError if the config's name is unknown, or is that of both splits.
    """
    names = [*splits]
    named, other = getattr(data, split), data.train if split == "val" else data.val
    if named is None:
        return next((name for name in usual[split] if name in names and name != other), None)
    if named not in names:
        raise InputError(
            Key(f"data.{split}", named),
            f": {where} has no such split{nearest(named, names)}",
            advice=f"its splits are {', '.join(names)}",
        )
    if named == other:
        raise InputError(
            Key("data.val", named), ": is also the training split", advice=f"the splits are {', '.join(names)}"
        )
    return named
