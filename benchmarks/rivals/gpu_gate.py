"""Checks that the contenders of `benchmarks/gpu.py` compute the same losses; otherwise their speeds are not comparable.

From equal weights and images, each takes a few steps in float32 without TF32, and as many in bfloat16. The losses must
fall by several percent, so that they reflect gradients and updates as well as the forward pass. Measured on a CPU, for
ResNet-50 at 224 px and 8 images: losses of the libraries in float32 agree to 1e-5, those in bfloat16 differ from
float32 by up to 6e-4, and the losses fall by an eighth. Mistakes in float32 differ by more: a learning rate 5% off by
6.4e-3, the stride in the block's first convolution by 8.5e-4, an epsilon of 1e-3 in batch norm by 5.6e-4, and one
channel's standard deviation 2% off by 3.8e-4.
"""

from collections.abc import Mapping

from benchmarks.rivals.gpu_parts import OURS, RIVAL
from benchmarks.rivals.gpu_results import Table

FLOAT32, BFLOAT16 = 2e-4, 5e-3
"""Largest relative differences: between contenders in float32, and between bfloat16 and float32 of each."""
WORSE, LEAST = 3.0, 1e-3
"""Our bfloat16 error may be up to this multiple of the rival's error, and in any case up to this value."""
FALL = 4 * BFLOAT16
"""Fraction of the first loss by which losses must fall; otherwise wrong gradients would not be noticed."""


def judge(table: Table) -> tuple[list[str], bool]:
    """Return lines with the results, and whether the gate passed."""
    losses = {
        kind: {n: f["losses"] for n, f in table.below(f"gate/{kind}/").items()} for kind in ("float32", "bfloat16")
    }
    lines: list[str] = []
    wrong: list[str] = []

    def check(name: str, value: float, limit: float) -> None:
        lines.append(f"{name}: {value:.1e} of at most {limit:.1e}")
        if not value <= limit:
            wrong.append(name)

    exact = losses["float32"]
    if OURS in exact:
        first, last = exact[OURS][0], exact[OURS][-1]
        check("remaining fraction of the loss", 1 - (first - last) / first, 1 - FALL)
    if exact.keys() >= {OURS, RIVAL}:
        check("float32, ours against torch", relative_difference(exact[OURS], exact[RIVAL]), FLOAT32)
    errors = {
        name: relative_difference(results, exact[name]) for name, results in losses["bfloat16"].items() if name in exact
    }
    for name, error in errors.items():
        check(f"bfloat16 against float32, {name}", error, BFLOAT16)
    if errors.keys() >= {OURS, RIVAL}:
        check("bfloat16, ours against torch's error", errors[OURS], max(LEAST, WORSE * errors[RIVAL]))
    missing = [key for key in table.failures if key.startswith("gate/")]
    if wrong:
        verdict = f"FAILED, {'; '.join(wrong)}"
    elif missing:
        verdict = f"not passed: no result of {', '.join(missing)}"
    else:
        verdict = "passed" if lines else "not measured"
    return [*lines, f"the gate: {verdict}"], not wrong


def relative_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference, or infinity if a value is NaN."""
    if len(losses) != len(expected):
        return float("inf")
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(differences) if all(each == each for each in differences) else float("inf")


def disagreement(table: Table, batch: int) -> Mapping[str, float]:
    """Return the difference of the first losses between ours and each mode of torch, at one batch size."""
    ours = table.figures(f"batches/{OURS}/{batch}")
    results = {
        key.split("/")[0]: figures
        for key, figures in table.below(f"batches/{RIVAL}/").items()
        if key.endswith(f"/{batch}")
    }
    return (
        {}
        if ours is None
        else {mode: relative_difference(figures["losses"], ours["losses"]) for mode, figures in results.items()}
    )
