"""The training step on a GPU: beside PyTorch at its best, beside the limits of the device, and lever by lever; and
CIFAR-10 to 94% beside airbench.

    python benchmarks/gpu.py --small

runs everything on a CPU with tiny networks, as a rehearsal; its numbers mean nothing. It has not been run on a GPU yet.

An hour with a GPU, in commands of at most ten minutes. First, where the data lie (CIFAR-10 as JPEG makes 18 MB, which
the GPU's machine decodes once, to 185 MB):

    python benchmarks/rivals/gpu_data.py pack DATA cifar10.packed.npz

then there, the same command until it says that nothing is left to do:

    python benchmarks/gpu.py --seconds 580 --parts gate batches rounds
    python benchmarks/gpu.py --seconds 580 --parts levers trace cifar --cifar cifar10.packed.npz --airbench FILE

Every measurement is a process of its own that is alone on the GPU, and is written to `--out` as soon as it is there.
The next start with the same `--out` takes what is missing, after a kill at any moment, too. A process that fails, that
gives no result within its limit or that runs out of memory is a row of the table, and stays one; `--again` takes keys
anew. A process that only the call's own end cuts off is taken again. None starts when less time is left than those like
it took or, where there are none, than a quarter of its limit. What is compiled and tuned stays in `--cache`.

Parts, in this order:

- facts: the limits of the device in JAX and in torch, the FLOPs of the step. Always.
- gate: whether both contenders compute the same, see `gpu_gate.py`. Where they do not, the call ends with code 1.
- batches: ResNet-50 at 224 pixels in bfloat16 at each of `--batches`, PyTorch in each of `--modes`: eager, and
  `torch.compile`'s modes, with CUDA graphs and without. Before any is timed, each takes 3 steps, whose losses are
  compared, and 10 more.
- rounds: both in turns, each at its best batch, PyTorch in its best mode.
- levers: changes that could make the step quicker, one by one, for that network and a ResNet-18 at 32 pixels; see
  `contenders/jax_levers.py`.
- trace: the kernels that take most of a step, and of a run on CIFAR-10.
- cifar: `--recipe` to its end, `--seeds` times in one process, and as many runs of `--airbench`, a script of
  github.com/KellerJordan/cifar10-airbench, on the same pixels; what is timed, see `contenders/jax_cifar.py`.

PyTorch is that of `--torch`. Without it, what needs it is left out, and the table says so.
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
from benchmarks.rivals.gpu_children import Children, has_torch, probed
from benchmarks.rivals.gpu_data import is_packed
from benchmarks.rivals.gpu_parts import RIVAL, Cifar, Plan
from benchmarks.rivals.gpu_results import Refused, Table
from benchmarks.rivals.gpu_scale import GPU, MODES, SMALL, Scale, made_cifar
from benchmarks.rivals.gpu_table import render
from jaxddp.core.cache_folder import cache_folder

PARTS = ("gate", "batches", "rounds", "levers", "trace", "cifar")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which the call ends")
    parser.add_argument(
        "--limit",
        nargs="+",
        type=limit_of,
        default=[],
        metavar="[KEY=]SECONDS",
        help="of a process, in place of its own: of all, or of those whose keys begin so; the last that fits",
    )
    parser.add_argument("--again", nargs="+", default=[], metavar="KEY", help="measure again what begins so")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="the interpreter that has torch")
    parser.add_argument("--batches", nargs="+", type=int, help="to try")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="of torch")
    parser.add_argument("--rounds", type=int, help="starts of each contender, and turns of each lever")
    parser.add_argument("--steps", type=int, help="in a turn")
    parser.add_argument(
        "--cifar", type=Path, metavar="DATA", help="a packed file, or as data.path; no TensorFlow is there"
    )
    parser.add_argument("--recipe", default="cifar10_fast", help="a name in configs/, or the path of a recipe file")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe's settings")
    parser.add_argument("--seeds", type=int, help="of the recipe; runs of airbench's script")
    parser.add_argument("--airbench", type=Path, metavar="FILE", help="a script of airbench")
    parser.add_argument("--small", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="by default in the user's cache folder")
    parser.add_argument("--out", type=Path, help="runs/benchmarks/gpu.json, or gpu-small.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    # An exit in good order, which ends the child that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    cache = (options.cache or cache_folder() / "benchmark").absolute()
    if options.small and options.cifar is None:
        options.cifar = made_cifar(cache / "data/made.packed.npz")
    scale, cifar = scale_of(options), cifar_of(options)
    with tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), cache, {"JAX_PLATFORMS": "cpu"} if options.small else {})
        table = table_of(options, scale, cifar, children)
        rival = table.figures(f"facts/{RIVAL}") is not None or has_torch(options.torch)
        plan = Plan(scale, cifar, table, children.out, cache, rival, tuple(options.limit))
        call = Call(plan, children, options.torch, begin + options.seconds)
        parts = ("facts", *(part for part in PARTS if part in options.parts))
        try:
            passed = call.take(parts)
        finally:
            print(f"\n{render(plan)}\n\n{ended(call.left(parts), table)}\nresults: {table.path}")
    if not passed:
        sys.exit("gpu.py: the gate failed, so speeds compare nothing; name --parts without it to measure all the same")


def scale_of(options: argparse.Namespace) -> Scale:
    given = {name: getattr(options, name) for name in ("batches", "modes", "rounds", "steps", "seeds")}
    return replace(SMALL if options.small else GPU, **{name: value for name, value in given.items() if value})


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
    """The table of `--out`, without what is to be measured again; nothing is measured for one of something else."""
    platform, device = probed(children.environment)
    if not options.small and platform != "gpu":
        refuse("JAX finds no GPU here; start this where there is one, or see that it works with --small")
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


def ended(left: list[str], table: Table) -> str:
    """Whether the table is whole, else what is left and how to go on."""
    if not left:
        return f"whole: nothing is left to do; {len(table.measured)} rows, of which {len(table.failures)} failed"
    more = f", … ({len(left)} in all)" if len(left) > 4 else ""
    return f"left to do: {', '.join(left[:4])}{more}\ncontinue with: {shlex.join(['python', *without_again(sys.argv)])}"


def without_again(words: list[str]) -> list[str]:
    """A command without `--again` and its keys: what is left of those is missing already."""
    if "--again" not in words:
        return words
    start = words.index("--again")
    after = next((at for at in range(start + 1, len(words)) if words[at].startswith("--")), len(words))
    return words[:start] + words[after:]


def limit_of(word: str) -> tuple[str, float]:
    key, _, seconds = word.rpartition("=")
    return key, float(seconds)


def refuse(line: str) -> NoReturn:
    print(f"gpu.py: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
