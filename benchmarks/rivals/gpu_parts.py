"""Lists the measurements of each part of `benchmarks/gpu.py`, some of which depend on earlier results."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rivals.contenders.case import Case, Task
from benchmarks.rivals.contenders.step_variants import VARIANTS
from benchmarks.rivals.gpu_data import is_packed
from benchmarks.rivals.gpu_results import Table
from benchmarks.rivals.gpu_scale import EAGER, Scale

OURS, RIVAL = "jaxddp", "torch"
PRECISIONS = ("float32", "bfloat16")
GATE_LOSSES = 5
COMMANDS = ("resumed", "float16", "reproducible", "commands")
"""The keys of `contenders/jax_command.py`."""


class NotRun(Exception):
    """A part cannot be measured. The text is the reason."""


@dataclass(frozen=True)
class Measurement:
    """A child process, and the keys of its results.

    Attributes:
        script: Name of a script in the contenders' folder.
        limit: Time limit in seconds.
        task: The task of a contender of steps; other scripts get `words`.
        keys: Keys of several results, each below `key`; the script gets the missing ones.
        product: A file that the script must write, too.
        smaller: Keys of the same measurement with fewer images. If one ran out of memory, this one is skipped.
    """

    key: str
    script: str
    limit: float
    task: Task | None = None
    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    product: Path | None = None
    smaller: tuple[str, ...] = ()

    def missing(self, table: Table) -> list[str]:
        """Return the keys of missing results; none if the measurement failed."""
        if self.key in table.failures:
            return []
        if self.keys:
            return [f"{self.key}/{each}" for each in self.keys if f"{self.key}/{each}" not in table.measured]
        is_product_missing = self.product is not None and not self.product.is_file()
        return [self.key] if self.key not in table.measured or is_product_missing else []


@dataclass(frozen=True)
class Pixels:
    """A data set: arrays, or the files of a packed one and their digest."""

    files: tuple[Path, ...]
    digest: str | None

    @classmethod
    def of(cls, files: Sequence[Path]) -> "Pixels":
        is_file = bool(files) and files[0].is_file() and is_packed(files[0])
        content = b"".join(path.read_bytes() for path in sorted(files)) if is_file else b""
        digest = hashlib.sha256(content).hexdigest()[:12] if is_file else None
        return cls(tuple(path.absolute() for path in files), digest)

    def unpacked(self, cache: Path) -> Path:
        return self.files[0] if self.digest is None else cache / "data" / f"{self.digest}.pixels.npz"


@dataclass(frozen=True)
class Cifar:
    """The data and recipes for CIFAR-10, and the data of the part `command`."""

    pixels: Pixels
    recipes: tuple[str, ...]
    settings: tuple[str, ...]
    airbench: Path | None
    digits: Pixels = Pixels((), None)


@dataclass(frozen=True)
class Plan:
    """The measurements of a benchmark.

    Attributes:
        out: File to which children write their results.
        cache: Folder for weights and pixels.
        has_rival: Whether an interpreter with torch exists.
        limits: Time limits by prefix of keys. They replace the usual limits of the children.
        variants: Variants of the step that are measured; empty for all.
    """

    scale: Scale
    cifar: Cifar
    table: Table
    out: Path
    cache: Path
    has_rival: bool
    limits: tuple[tuple[str, float], ...] = ()
    variants: tuple[str, ...] = ()

    def pending(self, part: str) -> list[Measurement]:
        """Return the missing measurements of a part, in order. Raises NotRun."""
        makers = {"facts": self._facts, "gate": self._gate, "batches": self._batches, "rounds": self._rounds}
        makers |= {"variants": self._variants, "trace": self._trace, "cifar": self._cifar}
        makers |= {"command": self._command, "networks": self._networks}
        return [self._limited(each) for each in makers[part]() if each.missing(self.table)]

    def best(self, name: str) -> tuple[int, str | None]:
        """Return the batch size and mode with the most images per second. Raises NotRun if none was measured."""
        speeds = self.speeds(name)
        if not speeds:
            raise NotRun(f"no batch of {name} was measured; see the part batches")
        return max(speeds, key=lambda choice: speeds[choice])

    def speeds(self, name: str) -> dict[tuple[int, str | None], float]:
        """Return the images per second of each (batch, mode)."""
        results = self.table.below(f"batches/{name}/")
        chosen = {rest: (int(rest.split("/")[-1]), rest.split("/")[0] if "/" in rest else None) for rest in results}
        return {chosen[rest]: chosen[rest][0] / figures["step"] for rest, figures in results.items()}

    def label(self, recipe: str) -> str:
        """Name of a recipe in keys."""
        return " ".join([Path(recipe).stem, *self.cifar.settings])

    # --- Parts ---

    def _facts(self) -> Iterator[Measurement]:
        yield self._weights(self.scale.case)
        task = self._task(replace(self.scale.case, batch=self.scale.gate))
        yield Measurement(f"facts/{OURS}", "jax_facts", 240, task)
        if self.has_rival:
            yield Measurement(f"facts/{RIVAL}", "torch_facts", 180, task)

    def _gate(self) -> Iterator[Measurement]:
        for precision in PRECISIONS:
            case = replace(self.scale.case, precision=precision, batch=self.scale.gate)
            task = replace(self._task(case), steps=1, turns=1, warmup=0, losses=GATE_LOSSES)
            for name in self._names():
                variant = EAGER if name == RIVAL else None
                yield self._step(f"gate/{precision}/{name}", name, replace(task, variant=variant))

    def _batches(self) -> Iterator[Measurement]:
        modes = {OURS: (None,), RIVAL: self.scale.modes}
        for batch in self.scale.batches:
            task = self._task(replace(self.scale.case, batch=batch))
            for name in self._names():
                for mode in modes[name]:
                    kind = f"batches/{name}/{mode}" if mode else f"batches/{name}"
                    smaller = tuple(f"{kind}/{fewer}" for fewer in self.scale.batches if fewer < batch)
                    step = self._step(f"{kind}/{batch}", name, replace(task, variant=mode))
                    yield replace(step, smaller=smaller)

    def _rounds(self) -> Iterator[Measurement]:
        for number in range(self.scale.rounds):
            # The order alternates between rounds, so that drift favors no contender.
            for name in self._names()[:: 1 if number % 2 else -1]:
                batch, mode = self.best(name)
                task = replace(self._task(replace(self.scale.case, batch=batch)), variant=mode)
                kind = self.prefix_of_rounds(name)
                yield self._step(f"{kind}/{number}", name, task)

    def prefix_of_rounds(self, name: str) -> str:
        """Return the prefix of the keys of a contender's rounds, which includes the batch size."""
        batch, mode = self.best(name)
        return f"rounds/{name}/{f'{mode} ' if mode else ''}{batch}"

    def _variants(self) -> Iterator[Measurement]:
        batch, _ = self.best(OURS)
        yield self._weights(self.scale.other)
        for case in (replace(self.scale.case, batch=batch), self.scale.other):
            task = replace(self._task(case), turns=self.scale.rounds)
            key, chosen = f"variants/{case.network} {case.batch}", self.variants or VARIANTS
            yield Measurement(key, "jax_variants", 480, task, keys=chosen)

    def _trace(self) -> Iterator[Measurement]:
        recipe, has_data = self.cifar.recipes[0], bool(self.cifar.pixels.files)
        if has_data:
            yield from self._unpacking("cifar/pixels", self.cifar.pixels)
            words = (*self._recipe_words(recipe), *self._trace_words("cifar"))
            yield Measurement(f"trace/{self.label(recipe)}", "jax_cifar", 300, words=words)
        # With data for CIFAR-10 but no measured batch size, trace only CIFAR-10; the trace of the step needs the best
        # batch size.
        if not has_data or self.speeds(OURS):
            batch, _ = self.best(OURS)
            task = replace(self._task(replace(self.scale.case, batch=batch)), steps=GATE_LOSSES)
            yield Measurement(f"trace/step {batch}", "jax_trace", 240, task, self._trace_words("step"))

    def _cifar(self) -> Iterator[Measurement]:
        if not self.cifar.pixels.files:
            raise NotRun("no data; give them with --cifar DATA")
        yield from self._unpacking("cifar/pixels", self.cifar.pixels)
        seeds = tuple(map(str, range(self.scale.seeds)))
        for recipe in self.cifar.recipes:
            words = self._recipe_words(recipe)
            yield Measurement(f"cifar/{self.label(recipe)}/seed", "jax_cifar", 480, words=words, keys=seeds)
        if self.cifar.airbench is not None and self.has_rival:
            pixels = self.cifar.pixels.unpacked(self.cache)
            words = (str(self.cifar.airbench), "--data", str(pixels))
            words += ("--folder", str(self.cache / "airbench" / pixels.stem), "--out", str(self.out))
            key = f"cifar/{self.cifar.airbench.stem}/run"
            yield Measurement(key, "torch_airbench", 480, words=words, keys=seeds)

    def _command(self) -> Iterator[Measurement]:
        if not self.cifar.digits.files:
            raise NotRun("no data; give them with --digits DATA")
        yield from self._unpacking("command/pixels", self.cifar.digits)
        data, folder = self.cifar.digits.unpacked(self.cache), self.cache / "command"
        words = ("digits", "--data", str(data), "--folder", str(folder), "--out", str(self.out))
        words += ("--set", f"train.duration={self.scale.command}")
        yield Measurement("command", "jax_command", 480, words=words, keys=COMMANDS)

    def _networks(self) -> Iterator[Measurement]:
        for case in self.scale.networks:
            yield self._weights(case)
            for name, mode in ((OURS, None), *((RIVAL, mode) for mode in self.scale.modes if self.has_rival)):
                kind = f"networks/{case.network} {case.batch}/{name}"
                yield self._step(f"{kind}/{mode}" if mode else kind, name, replace(self._task(case), variant=mode))

    # --- Helpers of the parts ---

    def _unpacking(self, key: str, pixels: Pixels) -> Iterator[Measurement]:
        if pixels.digest is not None:
            product = pixels.unpacked(self.cache)
            words = ("unpack", *map(str, pixels.files), str(product), "--tell", str(self.out))
            yield Measurement(key, "../gpu_data", 120, words=words, product=product)

    def _trace_words(self, name: str) -> tuple[str, ...]:
        """Return options that write traces beside the table."""
        return "--trace", str(self.table.path.absolute().with_suffix(".traces") / name)

    def _recipe_words(self, recipe: str) -> tuple[str, ...]:
        words = (recipe, "--data", str(self.cifar.pixels.unpacked(self.cache)), "--out", str(self.out))
        # Of equal keys the last one counts.
        return (*words, "--set", *self.scale.settings, *self.cifar.settings)

    def _names(self) -> tuple[str, ...]:
        return (OURS, RIVAL) if self.has_rival else (OURS,)

    def _task(self, case: Case) -> Task:
        name = f"{case.network}-{case.stem}-{case.width}-{case.classes}.npz"
        scale = self.scale
        return Task(case, self.cache / "weights" / name, scale.steps, scale.turns, self.out, warmup=scale.warmup)

    def _weights(self, case: Case) -> Measurement:
        task, key = self._task(case), f"facts/weights of {case.network}"
        return Measurement(key, "jax_weights", 180, task, product=task.weights)

    def _step(self, key: str, name: str, task: Task) -> Measurement:
        # Inductor tunes every new shape; the others mostly load and run.
        seconds = 560 if task.variant not in (None, EAGER) else 300
        return Measurement(key, f"{name}_step", seconds, task)

    def _limited(self, each: Measurement) -> Measurement:
        fitting = [seconds for beginning, seconds in self.limits if each.key.startswith(beginning)]
        return replace(each, limit=fitting[-1]) if fitting else each
