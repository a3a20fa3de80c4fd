"""The results of `benchmarks/gpu.py` as lines of text."""

from collections.abc import Iterator, Mapping

from harness import Figures

# Bytes that a training step of ResNet-50 moves for an image of 224 pixels in bfloat16 if every tensor is read and
# written once where an operation must: with cuDNN's convolutions and batch norm in separate passes, and with batch norm
# fused into the convolutions. Only for this network at width 64.
BYTES_AN_IMAGE = {"batch norm apart": 347e6, "batch norm in the convolutions": 247e6}
COUNTED_FOR = {"network": "resnet50", "width": 64, "size": 224, "precision": "bfloat16"}


def render(report: Figures) -> str:
    sections = {"facts": _facts, "gate": _gate, "batches": _batches, "rounds": _rounds, "cifar": _cifar}
    lines = [f"case: {' '.join(map(str, report['case'].values()))}"]
    for part, section in (sections | {"levers": _levers}).items():
        if part in report:
            lines += ["", *section(report)]
    return "\n".join(lines)


def _facts(report: Figures) -> Iterator[str]:
    yield f"{'device':<10}{'version':<14}{'matmul TFLOP/s':>16}{'memory GB/s':>14}"
    for name in ("jaxddp", "torch"):
        if found := report["facts"].get(name):
            speeds = found["matmul_flops_a_second"] / 1e12, found["memory_bytes_a_second"] / 1e9
            yield f"{name:<10}{found['version']:<14}{speeds[0]:>16.1f}{speeds[1]:>14.0f}   {found['device']}"
    yield f"{report['facts']['jaxddp']['flops_an_image'] / 1e9:.2f} GFLOP an image"


def _gate(report: Figures) -> Iterator[str]:
    for name, losses in report["gate"].items():
        yield f"losses of {name:<8}{'  '.join(f'{loss:.6f}' for loss in losses)}   (float32, no TF32)"


def _batches(report: Figures) -> Iterator[str]:
    for name, speeds in report["batches"].items():
        cells = (f"{batch}: {'out of memory' if speed is None else f'{speed:,.1f}'}" for batch, speed in speeds.items())
        yield f"images/s of {name:<8}by batch   {'   '.join(cells)}"


def _rounds(report: Figures) -> Iterator[str]:
    found = report["rounds"]
    best = {key: _highest(report["facts"], key) for key in ("matmul_flops_a_second", "memory_bytes_a_second")}
    for name, speed in found["images_per_second"].items():
        share = speed * report["facts"]["jaxddp"]["flops_an_image"] / best["matmul_flops_a_second"]
        yield f"{name:<8}batch {found['batch'][name]:<6}{speed:>12,.1f} images/s   {share:.3f} of the matrix peak"
        if COUNTED_FOR.items() <= report["case"].items():
            floors = {label: best["memory_bytes_a_second"] / moved for label, moved in BYTES_AN_IMAGE.items()}
            cells = (f"{speed / floor:.3f} of {floor:,.0f} ({label})" for label, floor in floors.items())
            yield f"{'':<14}as a share of what the memory allows: {'; '.join(cells)}"
    low, high = min(found["ratio_of_each_round"]), max(found["ratio_of_each_round"])
    yield (
        f"ratio {found['ratio']:.3f}   (rounds {low:.3f} to {high:.3f}, {len(found['ratio_of_each_round'])} of them; "
        f"best turns {found['ratio_of_best_turns']:.3f}; target {found['target']})"
    )


def _cifar(report: Figures) -> Iterator[str]:
    found = report["cifar"]
    if found is None:
        yield "CIFAR-10: left out; --cifar PATH names the data"
        return
    seconds = found["seconds_to_top1"]
    reached = "never reached" if seconds is None else f"in {seconds:.1f} s, compiling and validation included"
    yield (
        f"CIFAR-10: {found['epoch']:.3f} s an epoch of {found['examples']:,}; top-1 of {found['wanted_top1']:.0%} "
        f"{reached}; {found['top1']:.2%} after {len(found['epoch_seconds'])} epochs"
    )


def _levers(report: Figures) -> Iterator[str]:
    for case, variants in report["levers"].items():
        yield f"{case:<88}{'ms a step':>10}{'ratio':>8}   rounds"
        for name, found in variants.items():
            yield f"  {name[:84]:<86}{_lever(found)}"


def _lever(found: Figures) -> str:
    if "refused" in found:
        return f"refused: {found['refused']}"
    each = found["ratio_of_each_round"]
    return f"{1000 * found['step']:>10.2f}{found['ratio']:>8.3f}   {min(each):.3f} to {max(each):.3f}"


def _highest(facts: Mapping[str, Figures], key: str) -> float:
    """The highest value that a library reaches on the same device."""
    return max(found[key] for found in facts.values())
