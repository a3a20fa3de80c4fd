"""Formats the table of `benchmarks/gpu.py` as text."""

import statistics
from collections.abc import Callable, Iterator

from benchmarks.common.harness import Figures, compare
from benchmarks.rivals.gpu_gate import disagreement, judge
from benchmarks.rivals.gpu_parts import OURS, RIVAL, NotRun, Plan

# Bytes per image that a training step of ResNet-50 of width 64 moves, at 224 pixels in bfloat16, if every operation
# reads and writes its tensors once: with batch norm in passes apart from cuDNN's convolutions, or fused into them.
BYTES_AN_IMAGE = {"batch norm apart": 347e6, "batch norm in the convolutions": 247e6}
COUNTED_FOR = {"network": "resnet50", "width": 64, "size": 224, "precision": "bfloat16"}
KERNELS = 12
TOP1 = 0.94


def render(plan: Plan) -> str:
    lines = [f"case: {plan.table.about['case']}, on {plan.table.about['device']}"]
    sections: tuple[Callable[[Plan], Iterator[str]], ...] = (
        _facts,
        _gate,
        _batches,
        _rounds,
        _variants,
        _trace,
        _cifar,
    )
    for section in (*sections, _failures):
        if results := list(section(plan)):
            lines += ["", *results]
    return "\n".join(lines)


def _facts(plan: Plan) -> Iterator[str]:
    if not plan.has_rival:
        yield "torch: not run; the interpreter of --torch has no torch"
    facts = _known_facts(plan)
    if facts:
        yield f"{'device':<10}{'version':<16}{'matmul TFLOP/s':>16}{'memory GB/s':>14}"
    for name, results in facts.items():
        speeds = results["matmul_flops_a_second"] / 1e12, results["memory_bytes_a_second"] / 1e9
        yield f"{name:<10}{results['version']:<16}{speeds[0]:>16.1f}{speeds[1]:>14.0f}   {results['device']}"
    if OURS in facts:
        yield f"{facts[OURS]['flops_an_image'] / 1e9:.2f} GFLOP an image"


def _gate(plan: Plan) -> Iterator[str]:
    for key, figures in plan.table.below("gate/").items():
        yield f"losses {key:<18}{'  '.join(f'{loss:.6f}' for loss in figures['losses'])}"
    yield from judge(plan.table)[0]


def _batches(plan: Plan) -> Iterator[str]:
    table, apart = plan.table, {batch: disagreement(plan.table, batch) for batch in plan.scale.batches}
    for name, mode in ((OURS, None), *((RIVAL, mode) for mode in plan.scale.modes if plan.has_rival)):
        cells = []
        for batch in plan.scale.batches:
            results = table.measured.get(f"batches/{name}/{mode}/{batch}" if mode else f"batches/{name}/{batch}")
            cells.append(f"{batch}: {_speed(results, batch, apart[batch].get(mode or ''))}")
        yield f"images/s of {name:<8}{mode or '':<28}by batch   {'   '.join(cells)}"
    if any(apart.values()):
        largest = max(value for results in apart.values() for value in results.values())
        yield f"their first losses are at most {largest:.1e} from ours"


def _speed(results: Figures | None, batch: int, apart: float | None) -> str:
    if results is None:
        return "not measured"
    return results["failed"].split(":")[0] if "failed" in results else f"{batch / results['step']:,.1f}"


def _rounds(plan: Plan) -> Iterator[str]:
    try:
        kinds = {name: plan.prefix_of_rounds(name) for name in ((OURS, RIVAL) if plan.has_rival else (OURS,))}
    except NotRun as why:
        yield f"rounds: not run; {why}"
        return
    turns = {name: plan.table.below(f"{kind}/") for name, kind in kinds.items()}
    seconds = {name: {n: f["step"] / plan.best(name)[0] for n, f in results.items()} for name, results in turns.items()}
    for name, results in seconds.items():
        if results:
            yield from _shares(plan, name, 1 / statistics.median(results.values()), kinds[name].removeprefix("rounds/"))
    both = sorted(set.intersection(*map(set, seconds.values())))
    if plan.has_rival and both:
        results = compare({name: [each[number] for number in both] for name, each in seconds.items()}, 1, 1.0)
        each = results["ratio_of_each_round"]
        yield (
            f"ratio {results['ratio']:.3f}   (rounds {min(each):.3f} to {max(each):.3f}, {len(each)} of them; "
            f"best turns {results['ratio_of_best_turns']:.3f}; target {results['target']})"
        )


def _shares(plan: Plan, name: str, speed: float, label: str) -> Iterator[str]:
    """Format a speed as a fraction of the device's limits, each the higher of the two libraries' measurements."""
    facts = _known_facts(plan)
    if OURS not in facts:
        yield f"{label:<40}{speed:>12,.1f} images/s"
        return
    best = {
        key: max(each[key] for each in facts.values()) for key in ("matmul_flops_a_second", "memory_bytes_a_second")
    }
    share = speed * facts[OURS]["flops_an_image"] / best["matmul_flops_a_second"]
    yield f"{label:<40}{speed:>12,.1f} images/s   {share:.3f} of the matrix peak"
    if COUNTED_FOR.items() <= vars(plan.scale.case).items():
        floors = {each: best["memory_bytes_a_second"] / moved for each, moved in BYTES_AN_IMAGE.items()}
        cells = (f"{speed / floor:.3f} of {floor:,.0f} ({each})" for each, floor in floors.items())
        yield f"{'':<10}as a fraction of the memory's limit: {'; '.join(cells)}"


def _variants(plan: Plan) -> Iterator[str]:
    for number, (key, results) in enumerate(plan.table.below("variants/").items()):
        if not number:
            yield f"{'variant':<98}{'ms a step':>10}{'ratio':>8}   rounds"
        each = results["ratio_of_each_round"]
        ratio = f"{results['ratio']:>8.3f}   {min(each):.3f} to {max(each):.3f}"
        yield f"{key[:96]:<98}{1000 * results['step']:>10.2f}{ratio}"


def _trace(plan: Plan) -> Iterator[str]:
    for key, results in plan.table.below("trace/").items():
        if not results["kernels"]:
            yield f"trace of {key}: no kernels in {results['file']}"
            continue
        busy, span = results["busy"], results["span"]
        yield f"trace of {key}: {span:.2f} ms, in {busy / span:.1%} of which a kernel runs; {results['file']}"
        for name, milliseconds, count in results["kernels"][:KERNELS]:
            yield f"  {milliseconds:>10.3f} ms{milliseconds / results['in_all']:>8.1%}{count:>8} x   {name[:80]}"


def _cifar(plan: Plan) -> Iterator[str]:
    if plan.cifar.data is None:
        yield "CIFAR-10: not run; give its data with --cifar DATA"
        return
    labels = [f"{plan.label}/seed"]
    if plan.cifar.airbench is None or not plan.has_rival:
        yield "airbench: not run; it takes --airbench FILE and a torch"
    else:
        labels.append(f"{plan.cifar.airbench.stem}/run")
    for label in labels:
        if runs := list(plan.table.below(f"cifar/{label}/").values()):
            seconds, top1 = ([run[name] for run in runs] for name in ("seconds", "top1"))
            reached = "at least" if statistics.mean(top1) >= TOP1 else "below"
            yield (
                f"{label}: {_spread(seconds, '.3f')} s, top-1 {_spread(top1, '.4f')}, {reached} {TOP1:.0%}   "
                f"({len(runs)} runs, each preparation, training and evaluation)"
            )
            if runs[0].get("images_placed") is not None:
                yield f"{'':<4}in addition, once: {runs[0]['images_placed']:.3f} s to copy the images to the device"


def _spread(values: list[float], form: str) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{form}} ± {deviation:{form}}"


def _failures(plan: Plan) -> Iterator[str]:
    for key, why in plan.table.failures.items():
        yield f"FAILED {key}: {why}"


def _known_facts(plan: Plan) -> dict[str, Figures]:
    results = {name: plan.table.figures(f"facts/{name}") for name in (OURS, RIVAL)}
    return {name: figures for name, figures in results.items() if figures is not None}
