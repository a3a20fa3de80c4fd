"""Compares the training step on a GPU with PyTorch and with the limits of the device, and tries options of the step.
It also compares training on CIFAR-10 to 94% with airbench.

    python benchmarks/gpu.py --small

rehearses everything on a CPU with tiny networks; its numbers mean nothing. On a GPU each of these commands takes at
most eight minutes. The same command continues after the limit (`--seconds`, 480) or a kill, until it prints that
nothing is left to do. The GPU's machine needs JAX, Flax, Optax, Orbax and Pillow, and PyTorch for its contenders.

    python benchmarks/rivals/gpu_data.py pack DIGITS digits.packed.npz      # on the machine with the data
    python benchmarks/rivals/gpu_data.py pack CIFAR c10.packed.npz          # c10.1.packed.npz and c10.2.packed.npz

    python benchmarks/gpu.py --parts command --digits digits.packed.npz
    python benchmarks/gpu.py --parts gate batches rounds
    python benchmarks/gpu.py --parts variants --variants "XLA's first convolution"
    python benchmarks/gpu.py --parts trace
    python benchmarks/gpu.py --parts cifar --cifar c10.*.packed.npz --seeds 30
    python benchmarks/gpu.py --parts cifar --cifar c10.*.packed.npz --seeds 10 --airbench airbench94_muon.py
    python benchmarks/gpu.py --parts cifar --cifar c10.*.packed.npz --seeds 3 --recipe cifar10_95 cifar10_96
    python benchmarks/gpu.py --parts variants --rounds 5 --steps 20
    python benchmarks/gpu.py --parts networks

Every measurement runs in a separate process, alone on the GPU, is printed, and is written to `--out` at once. A process
that fails, exceeds its limit or runs out of memory becomes a row of the table; `--again KEY` repeats it. The next call
repeats a process that the end of a call has cut off. A process starts only if enough time is left: the time that
similar processes took, or a quarter of its limit. Compiled and tuned programs are kept in `--cache`.

Parts, in this order:

- facts: the limits of the device in JAX and in torch, and the FLOPs of the step. This part always runs.
- command: a run of the digits that is killed and resumed, float16, `parallel.reproducible`, and the commands
  (`rivals/contenders/jax_command.py`).
- gate: checks that both contenders compute the same losses (`rivals/gpu_gate.py`). Otherwise the call ends with code 1.
- batches: ResNet-50 at 224 pixels in bfloat16 at each of `--batches`, PyTorch in each of `--modes`: eager, and the
  modes of `torch.compile`, with and without CUDA graphs. The losses of the first 3 steps are compared.
- rounds: both contenders alternate, each at its best batch, PyTorch in its best mode.
- variants: changes of the step, for that network and a ResNet-18 at 32 pixels, in one process for each network
  (`rivals/contenders/jax_variants.py`).
- trace: the kernels that take most of a step, with the bytes a second of each, and of a run on CIFAR-10.
- cifar: each `--recipe` to its end, `--seeds` times in one process, and as many runs of `--airbench`, a script of
  github.com/KellerJordan/cifar10-airbench, on the same pixels (`rivals/contenders/jax_cifar.py` describes the
  timing).
- networks: the step of ViT-S/16 and ConvNeXt-T, and PyTorch's in each of `--modes`.

`--torch` names a Python with PyTorch. Without one, the table says which measurements are skipped.
"""

import argparse
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
from benchmarks.rivals.contenders.step_variants import VARIANTS
from benchmarks.rivals.gpu_call import Call
from benchmarks.rivals.gpu_children import Children, has_torch, probe_device
from benchmarks.rivals.gpu_parts import RIVAL, Cifar, Pixels, Plan
from benchmarks.rivals.gpu_results import Refused, Table
from benchmarks.rivals.gpu_scale import GPU, MODES, SMALL, Scale, write_small_cifar
from benchmarks.rivals.gpu_table import render
from jaxddp.core.files import cache_folder

PARTS = ("command", "gate", "batches", "rounds", "variants", "trace", "cifar", "networks")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, help="time limit of this call (default: 480; with --small none)")
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
    for name in ("--digits", "--cifar"):
        several = {"type": Path, "nargs": "+", "default": [], "metavar": "DATA"}
        parser.add_argument(name, **several, help="packed files, or any data.path that needs no TensorFlow")
    parser.add_argument("--recipe", nargs="+", default=["cifar10_fast"], help="names in configs/, or recipe files")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the recipes")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[], help="default: all")
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
    if options.small and not options.cifar:
        options.cifar = options.digits = [write_small_cifar(cache / "data/made.packed.npz")]
    scale, cifar = scale_of(options), cifar_of(options)
    with tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), cache, {"JAX_PLATFORMS": "cpu"} if options.small else {})
        table = table_of(options, scale, cifar, children)
        has_rival = table.figures(f"facts/{RIVAL}") is not None or has_torch(options.torch)
        limits, variants = tuple(options.limit), tuple(options.variants)
        plan = Plan(scale, cifar, table, children.out, cache, has_rival, limits, variants)
        seconds = options.seconds or (float("inf") if options.small else 480)
        call = Call(plan, children, options.torch, begin + seconds)
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
    for path in (*options.digits, *options.cifar, *filter(None, [options.airbench])):
        if not path.exists():
            refuse(f"{path}: no such file")
    digits, pixels = Pixels.of(options.digits), Pixels.of(options.cifar)
    return Cifar(pixels, tuple(options.recipe), tuple(options.set), options.airbench, digits)


def table_of(options: argparse.Namespace, scale: Scale, cifar: Cifar, children: Children) -> Table:
    """Open the table of `--out` without the rows to repeat. Exits if it belongs to another device or case."""
    platform, device = probe_device(children.environment)
    if not options.small and platform != "gpu":
        refuse("JAX finds no GPU here; run this on a machine with a GPU, or rehearse with --small")
    about = {"case": str(scale.case), "other network": str(scale.other), "device": device}
    if files := cifar.pixels.files:
        about["data set"] = cifar.pixels.digest or files[0].name
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
