"""Replaces files by FIFOs, sockets, links and other non-regular files."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def _socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        # The address of a socket must be short.
        here = os.getcwd()
        os.chdir(path.parent)
        bound.bind(path.name)
        os.chdir(here)


def _link_to_fifo(path: Path) -> None:
    target = path.with_name(f"{path.name}.fifo")
    os.mkfifo(target)
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": _socket_at,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a FIFO": _link_to_fifo,
}


def replace_by_irregular(path: Path, kind: str) -> Path:
    """Replace a file by a non-regular one, and return the new path of the file."""
    kept = path.rename(path.with_name("kept-aside"))
    KINDS[kind](path)
    return kept


def put_back(path: Path, kept: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
    path.with_name(f"{path.name}.fifo").unlink(missing_ok=True)
    kept.rename(path)
