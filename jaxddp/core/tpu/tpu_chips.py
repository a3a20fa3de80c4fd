"""Finds the TPU chips of this machine, without JAX."""

import os
from collections.abc import Mapping
from pathlib import Path

_GOOGLE = "0x1ae0"
"""The vendor of TPU chips on the PCI bus. Network cards and disks of Google's machines have the same vendor."""
_NO_CHIPS = ("0x01", "0x02")
"""The beginning of the PCI classes of disks and of network cards."""


def permits(environ: Mapping[str, str], *platforms: str) -> bool:
    """Return whether JAX_PLATFORMS permits one of some platforms, in lower case. If it is not set, it permits all."""
    listed = {word.strip() for word in environ.get("JAX_PLATFORMS", "").lower().split(",")} - {""}
    return not listed or not listed.isdisjoint(platforms)


def local_chips(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Path]:
    """Return the device files of this machine's TPU chips. The list is empty if JAX_PLATFORMS excludes TPUs.

    Older chips have the files `/dev/accel0`, `/dev/accel1` and so on, newer ones `/dev/vfio/0` and so on, one for each
    IOMMU group. In a container, there are only the container's files.

    Args:
        root: the folder that holds `dev` and `sys`.
    """
    if not permits(environ, "tpu"):
        return []
    numbered = [file for file in (root / "dev/vfio").glob("*") if file.name.isdecimal()]
    groups = root / "sys/kernel/iommu_groups"
    files = [file for file in numbered if _has_chip(groups / file.name / "devices")]
    # A kernel's own class of accelerators has the folder /dev/accel, and its files belong to other vendors.
    accelerators = [file for file in (root / "dev").glob("accel*") if file.name.removeprefix("accel").isdecimal()]
    if accelerators and _has_chip(root / "sys/bus/pci/devices"):
        files += accelerators
    return sorted(files, key=lambda file: (len(file.name), file.name))


def _has_chip(devices: Path) -> bool:
    """Return whether a folder of PCI devices has a device of Google that is neither a network card nor a disk."""
    of_google = [vendor.parent for vendor in devices.glob("*/vendor") if _text(vendor) == _GOOGLE]
    return any(not _text(device / "class").startswith(_NO_CHIPS) for device in of_google)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""
