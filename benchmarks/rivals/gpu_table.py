"""Formats the table of `benchmarks/gpu.py` as text."""

import statistics
from collections.abc import Callable, Iterator

from benchmarks.common.harness import Figures, compare
from benchmarks.rivals.gpu_gate import disagreement, judge
from benchmarks.rivals.gpu_parts import OURS, RIVAL, NotRun, Plan

KERNELS = 12


def render(plan: Plan) -> str:
    lines = [f"case: {plan.table.about['case']}, on {plan.table.about['device']}"]
    sections: tuple[Callable[[Plan], Iterator[str]], ...] = (
        _command,
        _facts,
        _gate,
        _batches,
        _rounds,
        _variants,
        _trace,
        _cifar,
        _networks,
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
            rate = results.get("bytes_a_second", {}).get(name, 0) / 1e9
            share = f"{milliseconds / results['in_all']:>8.1%}{count:>8} x"
            yield f"  {milliseconds:>10.3f} ms{share}{f'{rate:>8.0f} GB/s' if rate else '':<14}{name[:80]}"


def _cifar(plan: Plan) -> Iterator[str]:
    if not plan.cifar.pixels.files:
        yield "CIFAR-10: not run; give its data with --cifar DATA"
        return
    if plan.cifar.airbench is None or not plan.has_rival:
        yield "airbench: not run; it takes --airbench FILE and a torch"
    runs: dict[str, list[Figures]] = {}
    for key, figures in plan.table.below("cifar/").items():
        runs.setdefault(key.rpartition("/")[0], []).append(figures)
    for label, each in ((label, each) for label, each in runs.items() if label):
        seconds, top1 = ([run[name] for run in each] for name in ("seconds", "top1"))
        line = f"{label}: {_mean(seconds, 3)} s, top-1 {_mean(top1, 4)}   (± standard error; n = {len(each)})"
        if all("of_it" in run for run in each):
            parts = (f"{part} {_mean([run['of_it'][part] for run in each], 3)} s" for part in each[0]["of_it"])
            line += f"   of it {', '.join(parts)}"
        yield line
        if each[0].get("images_placed") is not None:
            yield f"{'':<4}in addition, once: {each[0]['images_placed']:.3f} s to copy the images to the device"


def _mean(values: list[float], digits: int) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def _command(plan: Plan) -> Iterator[str]:
    for key, figures in plan.table.below("command/").items():
        shown = (f"{name}: {value}" for name, value in figures.items() if name != "took")
        yield f"command {key:<14}{'; '.join(shown)}"


def _networks(plan: Plan) -> Iterator[str]:
    for key, figures in plan.table.below("networks/").items():
        batch = int(key.split("/")[0].split()[-1])
        yield f"images/s of {key:<50}{batch / figures['step']:>12,.1f}"


def _failures(plan: Plan) -> Iterator[str]:
    for key, why in plan.table.failures.items():
        yield f"FAILED {key}: {why}"


def _known_facts(plan: Plan) -> dict[str, Figures]:
    results = {name: plan.table.figures(f"facts/{name}") for name in (OURS, RIVAL)}
    return {name: figures for name, figures in results.items() if figures is not None}
