"""Compares the training step on a GPU with PyTorch and with the limits of the device, and tries options of the step.
It also compares training on CIFAR-10 to 94% with airbench.

    python benchmarks/gpu.py --small

rehearses everything on a CPU with tiny networks; its numbers mean nothing.

The benchmark takes about an hour on a GPU, in commands of at most ten minutes. First pack the data on the
machine that has them. CIFAR-10 as JPEG becomes 18 MB, which the GPU's machine decodes once to 185 MB:

    python benchmarks/rivals/gpu_data.py pack DATA cifar10.packed.npz

Then, on the GPU's machine, repeat these commands until they print that nothing is left to do:

    python benchmarks/gpu.py --seconds 580 --parts gate batches rounds
    python benchmarks/gpu.py --seconds 580 --parts variants trace cifar --cifar cifar10.packed.npz --airbench FILE

Every measurement runs in a separate process, alone on the GPU, and is written to `--out` at once. The next call with
the same `--out` measures the missing results, also after a kill. A process that fails, exceeds its limit or runs out of
memory becomes a row of the table; `--again KEY` repeats it. The next call
repeats a process that the end of a call has cut off. A process starts only if enough time is left: the time that
similar processes took, or a quarter of its limit.
Compiled and tuned programs are kept in `--cache`.

Parts, in this order:

- facts: the limits of the device in JAX and in torch, and the FLOPs of the step. This part always runs.
- gate: checks that both contenders compute the same losses (`rivals/gpu_gate.py`). Otherwise the call ends with code 1.
- batches: ResNet-50 at 224 pixels in bfloat16 at each of `--batches`, PyTorch in each of `--modes`: eager, and the
  modes of `torch.compile`, with and without CUDA graphs. Before the timing, each contender takes 3 steps,
  whose losses are compared, and 10 more.
- rounds: both contenders alternate, each at its best batch, PyTorch in its best mode.
- variants: changes of the step, for that network and a ResNet-18 at 32 pixels, in one process for each network
  (`rivals/contenders/jax_variants.py`).
- trace: the kernels that take most of a step, and of a run on CIFAR-10.
- cifar: `--recipe` to its end, `--seeds` times in one process, and as many runs of `--airbench`, a script of
  github.com/KellerJordan/cifar10-airbench, on the same pixels (`rivals/contenders/jax_cifar.py` describes the
  timing).

`--torch` names a Python with PyTorch. Without one, the table says which measurements are skipped.
"""

import argparse
import hashlib
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.harness import machine
from benchmarks.rivals.gpu_call import Call
from benchmarks.rivals.gpu_children import Children, has_torch, probe_device
from benchmarks.rivals.gpu_data import is_packed
from benchmarks.rivals.gpu_parts import RIVAL, Cifar, Plan
from benchmarks.rivals.gpu_results import Refused, Table
from benchmarks.rivals.gpu_scale import GPU, MODES, SMALL, Scale, write_small_cifar
from benchmarks.rivals.gpu_table import render
from jaxddp.core.files import cache_folder

PARTS = ("gate", "batches", "rounds", "variants", "trace", "cifar")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit of this call (default: none)")
    parser.add_argument(
        "--limit",
        nargs="+",
        type=parse_limit,
        default=[],
        metavar="[KEY=]SECONDS",
        help="limit of every process, or of processes whose keys begin with KEY; the last match counts",
    )
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="KEY", help="repeat the measurements whose keys begin with KEY"
    )
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="an interpreter with torch")
    parser.add_argument("--batches", nargs="+", type=int, help="batch sizes to try")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="modes of torch to try")
    parser.add_argument(
        "--rounds",
        type=int,
        help="how often each contender is started, and how often each variant of the step is timed",
    )
    parser.add_argument("--steps", type=int, help="training steps in each timing of a contender or a variant")
    parser.add_argument(
        "--cifar", type=Path, metavar="DATA", help="a packed file, or any data.path that needs no TensorFlow"
    )
    parser.add_argument("--recipe", default="cifar10_fast", help="a name in configs/, or the path of a recipe file")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--seeds", type=int, help="number of runs of the recipe, and of airbench's script")
    parser.add_argument("--airbench", type=Path, metavar="FILE", help="a script of airbench")
    parser.add_argument("--small", action="store_true", help="rehearse with tiny networks on a CPU")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="default: in the user's cache folder")
    parser.add_argument("--out", type=Path, help="default: runs/benchmarks/gpu.json, or gpu-small.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    # An orderly exit also ends the running child.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    cache = (options.cache or cache_folder() / "benchmark").absolute()
    if options.small and options.cifar is None:
        options.cifar = write_small_cifar(cache / "data/made.packed.npz")
    scale, cifar = scale_of(options), cifar_of(options)
    with tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), cache, {"JAX_PLATFORMS": "cpu"} if options.small else {})
        table = table_of(options, scale, cifar, children)
        has_rival = table.figures(f"facts/{RIVAL}") is not None or has_torch(options.torch)
        plan = Plan(scale, cifar, table, children.out, cache, has_rival, tuple(options.limit))
        call = Call(plan, children, options.torch, begin + options.seconds)
        parts = ("facts", *(part for part in PARTS if part in options.parts))
        try:
            passed = call.take(parts)
        finally:
            print(f"\n{render(plan)}\n\n{describe_progress(call.left(parts), table)}\nresults: {table.path}")
    if not passed:
        sys.exit("gpu.py: the gate failed, so speeds are not comparable; to measure anyway, give --parts without gate")


def scale_of(options: argparse.Namespace) -> Scale:
    overrides = {name: getattr(options, name) for name in ("batches", "modes", "rounds", "steps", "seeds")}
    return replace(SMALL if options.small else GPU, **{name: value for name, value in overrides.items() if value})


def cifar_of(options: argparse.Namespace) -> Cifar:
    for path in (options.cifar, options.airbench):
        if path is not None and not path.exists():
            refuse(f"{path}: no such file")
    data = options.cifar and options.cifar.absolute()
    digest = None
    if data is not None and data.is_file() and is_packed(data):
        digest = hashlib.sha256(data.read_bytes()).hexdigest()[:12]
    return Cifar(data, digest, options.recipe, tuple(options.set), options.airbench)


def table_of(options: argparse.Namespace, scale: Scale, cifar: Cifar, children: Children) -> Table:
    """Open the table of `--out` without the rows to repeat. Exits if it belongs to another device or case."""
    platform, device = probe_device(children.environment)
    if not options.small and platform != "gpu":
        refuse("JAX finds no GPU here; run this on a machine with a GPU, or rehearse with --small")
    about = {"case": str(scale.case), "other network": str(scale.other), "device": device}
    if cifar.data is not None:
        about["data set"] = f"{cifar.data.name} {cifar.digest or ''}".strip()
    try:
        table = Table.open(options.out or Path(f"runs/benchmarks/gpu{'-small' if options.small else ''}.json"), about)
    except Refused as error:
        refuse(str(error))
    table.about |= {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    table.forget(options.again)
    table.save()
    return table


def describe_progress(left: list[str], table: Table) -> str:
    """Return a message that the table is complete, or that lists the missing results and the command to continue."""
    if not left:
        return f"complete: nothing is left to do; {len(table.measured)} rows, of which {len(table.failures)} failed"
    more = f", … ({len(left)} in all)" if len(left) > 4 else ""
    return f"left to do: {', '.join(left[:4])}{more}\ncontinue with: {shlex.join(['python', *without_again(sys.argv)])}"


def without_again(words: list[str]) -> list[str]:
    """Remove `--again` and its keys from a command: their rows are already removed from the table."""
    if "--again" not in words:
        return words
    start = words.index("--again")
    after = next((at for at in range(start + 1, len(words)) if words[at].startswith("--")), len(words))
    return words[:start] + words[after:]


def parse_limit(word: str) -> tuple[str, float]:
    key, _, seconds = word.rpartition("=")
    return key, float(seconds)


def refuse(line: str) -> NoReturn:
    print(f"gpu.py: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
