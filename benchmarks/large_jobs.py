"""Projects training on 8 to 100,000 devices: steps a second, bytes, memory, failures, checkpoints and restarts.

    python benchmarks/large_jobs.py
    python benchmarks/large_jobs.py --write

Nothing above 16 devices was run: every number is computed by the models of `large/ways.py` and `large/failures.py`,
which state their constants and sources. The script prints the tables and writes all rows as JSON. With `--write` it
also updates the tables and the figure of docs/large-jobs.md.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from benchmarks.common.harness import Figures
from benchmarks.large.failures import HOURS_OF_A_DEVICE, failures, restart_seconds, spare_share
from benchmarks.large.networks import Network, networks
from benchmarks.large.tables import DEVICES, FLEETS, VARIATIONS, sizes, tables, write_page
from benchmarks.large.ways import gain_of_shares, steps, straggling, straggling_of_groups

PAGE, FIGURE = Path("docs/large-jobs.md"), Path("docs/large-jobs.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/large_jobs.json"))
    parser.add_argument("--write", action="store_true", help=f"update {PAGE} and {FIGURE}")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    projected = networks()
    made = tables(projected)
    report = {"command": " ".join(["python", *sys.argv]), **rows(projected)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for name, table in made.items():
        print(f"{name}\n\n{table}")
    if options.write:
        # matplotlib is imported only here, because it takes half a second.
        from benchmarks.large.figure import draw

        write_page(PAGE, made)
        draw(projected, FIGURE)
    print(f"results: {options.out}")


def rows(projected: list[Network]) -> Figures:
    """Return all figures: a row for each network, number of devices, number of images and way."""
    stepped = [step for network in projected for pair in sizes(DEVICES) for step in steps(network, *pair)]
    failed = [
        asdict(known) | {"network": n.title, "source": source, "restart_seconds": restart_seconds(count, n.state_bytes)}
        for n in projected
        for count in DEVICES
        for source in HOURS_OF_A_DEVICE
        for known in [failures(count, n.state_bytes, source)]
    ]
    return {
        "steps": [
            asdict(step)
            | {"steps_per_second": 1 / step.seconds}
            | {"images_per_second": step.images_per_second, "efficiency": step.efficiency}
            for step in stepped
        ],
        "failures": failed,
        "spares": {source: spare_share(source) for source in HOURS_OF_A_DEVICE},
        "unequal_devices": {name: gain_of_shares(fleet) for name, fleet in FLEETS.items()},
        "stragglers": [
            {
                "devices": count,
                "variation": variation,
                "every_step": straggling(count, variation),
                "hosts_every_50_steps": straggling_of_groups(count, 8, 50, variation),
            }
            for count in DEVICES
            for variation in VARIATIONS
        ],
    }


if __name__ == "__main__":
    main()
