"""The sizes of the devices' slices in a run: measured at its start for `parallel.shares` "auto", and kept."""

import json
import logging

from jaxddp.setup.measured_shares import is_auto, measure_shares, shares_of, with_shares
from jaxddp.setup.run_setup import RunSetup
from jaxddp.shares import Shares, listed
from jaxddp.workdir.shares_file import SharesFile

_log = logging.getLogger("jaxddp.experiment")


def settle_shares(setup: RunSetup, file: SharesFile | None = None, *, resumes: bool = False) -> RunSetup:
    """Return the setup with the sizes of the slices of a run. Measure the devices for "auto", and log a line.

    All processes of a job must call this function together.

    Args:
        file: the file that keeps the measured shares; None for a run without a work directory.
        resumes: whether the run is resumed. It then uses the shares of the file, unless the devices have changed.

    Raises:
        InputError: the file cannot be written; see also `Layout.of`.
    """
    if is_auto(setup):
        setup, origin = _settle_auto(setup, file if resumes else None, file)
    else:
        origin = f"parallel.shares={setup.recipe.config.parallel.shares}"
    if setup.recipe.config.parallel.shares is not None and setup.topology.peers.is_first:
        sizes = [rows.stop - rows.start for _, rows in setup.slices]
        _log.info(f"shares: {origin}; slices of {listed(sizes)} images")
    return setup


def _settle_auto(setup: RunSetup, saved: SharesFile | None, file: SharesFile | None) -> tuple[RunSetup, str]:
    """Return the setup with shares that were saved or are measured now, and their ratio and origin as text."""
    peers = setup.topology.peers
    # Process 0 reads the file, because other hosts may not see its last write yet.
    text = peers.from_first("saved shares", lambda: json.dumps(("", "") if saved is None else saved.read()))
    shares, reason = json.loads(text)
    origin = "as measured at the start of the run"
    if not shares:
        if reason and peers.is_first:
            _log.info(f"shares: measured again, because {reason}")
        speeds = measure_shares(setup)
        division = setup.division
        arguments = speeds, peers.process_count, division.batch_size, division.unit_of_slice
        shares = peers.from_first("shares", lambda: shares_of(*arguments))
        origin = f"measured {listed([f'{speed:.3g}' for speed in speeds])} images/s"
        if file is not None and peers.is_first:
            file.write(shares)
    ratios = listed([f"{weight:g}" for weight in Shares.parse(shares).weights])
    return with_shares(setup, shares), f"{ratios}, {origin}"
