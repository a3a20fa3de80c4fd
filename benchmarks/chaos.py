"""Faults at random moments: does a job end or go on as it promises, and does it come to the same bits in the end?

    python benchmarks/chaos.py --kills 50 --seed 0
    python benchmarks/chaos.py --kills 50 --seed 0 --only "cable pulled"
    python benchmarks/chaos.py --kills 50 --seed 0 --number 17

A small network is trained for 60 steps, with a validation and a checkpoint each 10, by two processes: of one of two
hosts (network namespaces), or from images in a web server. Processes, launchers and machines are killed, stopped,
asked to stop or started again, cables pulled, a disk filled, a work directory taken away, the server stopped, at a
random moment of the start, the compilation, a step, a save, a validation, the end, or the start after a failure. Then
the run is started again, as a user would, until it is done, and its checkpoints, metrics.jsonl and validations are
compared with those of a run that nothing happened to: all bits, but for times. The same seed draws the same faults and
moments; between them the machine takes the time that it takes.

A promise that is not kept is told with the folder that keeps the run and all logs, and the exit code is 1. Faults that
need root (namespaces, a file system of their own) are left out for others, and it says so.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.harness import Figures, machine
from benchmarks.faults.outcomes import Outcome
from benchmarks.faults.promises import FAULTS, NEED_ROOT, Fault
from benchmarks.faults.scenario import Scenario, draw, is_root, play, undisturbed

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.ilsvrc import write_tree  # pyright: ignore[reportMissingImports]: the line above

SIDE, CLASSES, TRAIN, VAL = 16, 5, 200, 400
WIDTH = max(map(len, FAULTS)) + 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=[*FAULTS], help="of those faults, these")
    parser.add_argument("--number", type=int, nargs="+", help="of those faults, these numbers")
    parser.add_argument("--folder", type=Path, help="where to run, and to keep what went wrong; a temporary folder")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/chaos.json"))
    options = parser.parse_args()
    scenarios = [each for each in draw(options.seed, options.kills, possible()) if each.fault in options.only]
    scenarios = [each for each in scenarios if options.number is None or each.number in options.number]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="jaxddp-chaos-"))
    begin = time.monotonic()
    found = play_all(scenarios, folder)
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "found": found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    kept = sum(is_kept(each) for each in found)
    print(f"results: {options.out}\n\n{table(found)}")
    print(f"{kept} of {len(found)} as promised and identical, in {(time.monotonic() - begin) / 60:.0f} minutes")
    if kept == len(found):
        shutil.rmtree(folder)
    sys.exit(0 if kept == len(found) else 1)


def possible() -> dict[str, Fault]:
    """Those faults that this user can make."""
    if is_root():
        return FAULTS
    print(f"left out, since only root can: {', '.join(NEED_ROOT)}; and all on two hosts")
    without = {name: fault for name, fault in FAULTS.items() if name not in NEED_ROOT}
    return {
        name: Fault(
            fault.strike,
            fault.promise,
            tuple(place for place in fault.places if place != "hosts"),
            fault.moments,
            fault.passes,
            fault.options,
        )
        for name, fault in without.items()
    }


def play_all(scenarios: list[Scenario], folder: Path) -> list[Figures]:
    """All in turn; of those whose promises were kept no files stay."""
    data, references, found = write_data(folder), dict[str, Outcome](), list[Figures]()
    for scenario in scenarios:
        place, cache = scenario.place, folder / "programs"
        if place not in references:
            references[place] = undisturbed(place, made(folder / f"undisturbed-{place}"), data, cache)
        own = made(folder / f"{scenario.seed}-{scenario.number}")
        result = {"number": scenario.number, "seed": scenario.seed}
        result |= play(scenario, own, data, cache, references[place])
        found.append(result)
        print(f"{scenario}: {told(result)}", flush=True)
        if is_kept(result):
            shutil.rmtree(own)
        else:
            print(f"     kept in {own}; again: --seed {scenario.seed} --number {scenario.number}", flush=True)
    return found


def made(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_data(folder: Path) -> dict[str, Path]:
    """Small images as arrays, and as files for a store."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", TRAIN), ("val", VAL)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
        arrays[f"{split}_labels"] = np.arange(count) % CLASSES
    np.savez(folder / "images.npz", **arrays)
    tree = write_tree(folder / "tree", classes=CLASSES, images=TRAIN // CLASSES, val=VAL // 4, size=SIDE)
    return {"arrays": folder / "images.npz", "tree": tree}


# --- What came of it ---


def is_kept(found: Figures) -> bool:
    return not found["broken"] and not found.get("differs")


def told(found: Figures) -> str:
    if not is_kept(found):
        return f"NOT AS PROMISED: {found['broken'] or found['differs']}"
    struck = f"struck at step {found['step']}" if found["came"] else "came too late"
    return f"{struck}, ended with {found['codes']} after {found['seconds']:.1f} s, identical"


def table(found: list[Figures]) -> str:
    """By fault: how often, as promised, identical; the seconds to the line that names it, and to the end of all."""
    by_fault = defaultdict[str, list[Figures]](list)
    for each in found:
        by_fault[each["fault"]].append(each)
    columns = f"{'times':>6}{'struck':>8}{'as promised':>13}{'identical':>11}{'told, s':>13}{'ended, s':>13}"
    lines = [f"{'fault':<{WIDTH}}{columns}"]
    for name, several in sorted(by_fault.items()):
        # Of those that go on, the rest of the run is no time to an end.
        ended = [each for each in several if each.get("came") and any(each["codes"])]
        told = seconds([each["told"] for each in ended if each["told"] is not None])
        ends = seconds([each["seconds"] for each in ended]) or "goes on"
        kept = sum(not each["broken"] for each in several)
        same = sum(each.get("differs") == "" for each in several)
        struck = sum(bool(each.get("came")) for each in several)
        lines.append(f"{name:<{WIDTH}}{len(several):>6}{struck:>8}{kept:>13}{same:>11}{told:>13}{ends:>13}")
    return "\n".join(lines)


def seconds(found: list[float]) -> str:
    """The median, and the most."""
    return f"{statistics.median(found):.1f}, {max(found):.1f}" if found else ""


if __name__ == "__main__":
    main()
