"""Whether the contenders of `benchmarks/gpu.py` compute the same: speeds of different computations compare nothing.

From equal weights and images, each takes a few steps in float32 without TF32 and as many in bfloat16. The losses fall
by a tenth meanwhile, so that they show gradients and updates as well as the forward pass. On a CPU, for ResNet-50 at
224 px and 8 images, the libraries' losses in float32 agreed to 1e-5, those in bfloat16 were within 6e-4 of float32's,
and the losses fell by an eighth. In float32 a rate that is 5% off was 6.4e-3 away, the stride in the block's first
convolution 8.5e-4, an epsilon of 1e-3 in batch norm 5.6e-4, and one channel's deviation that is 2% off 3.8e-4.
"""

from collections.abc import Mapping

from benchmarks.rivals.gpu_parts import OURS, RIVAL
from benchmarks.rivals.gpu_results import Table

FLOAT32, BFLOAT16 = 2e-4, 5e-3
"""The largest relative difference: of the contenders' losses in float32, and of bfloat16's from float32's of each."""
WORSE, LEAST = 3.0, 1e-3
"""Ours in bfloat16 may be this many times as far from float32 as the rival's, or at least this far."""
FALL = 4 * BFLOAT16
"""By what share of the first loss the losses must fall, or wrong gradients would not be seen."""


def judge(table: Table) -> tuple[list[str], bool]:
    """Lines that say what was found, and whether nothing is wrong with it."""
    losses = {
        kind: {n: f["losses"] for n, f in table.below(f"gate/{kind}/").items()} for kind in ("float32", "bfloat16")
    }
    lines: list[str] = []
    wrong: list[str] = []

    def check(what: str, found: float, most: float) -> None:
        lines.append(f"{what}: {found:.1e} of at most {most:.1e}")
        if not found <= most:
            wrong.append(what)

    exact = losses["float32"]
    if OURS in exact:
        first, last = exact[OURS][0], exact[OURS][-1]
        check("losses fall too little: what is left", 1 - (first - last) / first, 1 - FALL)
    if exact.keys() >= {OURS, RIVAL}:
        check("float32, ours beside torch's", apart(exact[OURS], exact[RIVAL]), FLOAT32)
    errors = {name: apart(found, exact[name]) for name, found in losses["bfloat16"].items() if name in exact}
    for name, error in errors.items():
        check(f"bfloat16 beside float32, {name}", error, BFLOAT16)
    if errors.keys() >= {OURS, RIVAL}:
        check("bfloat16, ours as torch's permits", errors[OURS], max(LEAST, WORSE * errors[RIVAL]))
    missing = [key for key in table.failures if key.startswith("gate/")]
    if wrong:
        verdict = f"FAILED, {'; '.join(wrong)}"
    elif missing:
        verdict = f"not passed, there is no result of {', '.join(missing)}"
    else:
        verdict = "passed" if lines else "not measured"
    return [*lines, f"the gate: {verdict}"], not wrong


def apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where one is no number."""
    if len(found) != len(expected):
        return float("inf")
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return max(differences) if all(each == each for each in differences) else float("inf")


def disagreement(table: Table, batch: int) -> Mapping[str, float]:
    """How far the first losses of each mode of torch are from ours at a batch, by mode."""
    ours = table.figures(f"batches/{OURS}/{batch}")
    found = {
        key.split("/")[0]: figures
        for key, figures in table.below(f"batches/{RIVAL}/").items()
        if key.endswith(f"/{batch}")
    }
    return {} if ours is None else {mode: apart(figures["losses"], ours["losses"]) for mode, figures in found.items()}
