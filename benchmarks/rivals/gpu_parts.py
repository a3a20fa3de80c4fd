"""Lists the measurements of each part of `benchmarks/gpu.py`, some of which depend on earlier results."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rivals.contenders.case import Case, Task
from benchmarks.rivals.contenders.step_variants import VARIANTS
from benchmarks.rivals.gpu_results import Table
from benchmarks.rivals.gpu_scale import EAGER, Scale

OURS, RIVAL = "jaxddp", "torch"
PRECISIONS = ("float32", "bfloat16")
GATE_LOSSES = 5


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
class Cifar:
    """The data and recipes for 94% on CIFAR-10. `digest` is that of packed data, or None for arrays."""

    data: Path | None
    digest: str | None
    recipe: str
    settings: tuple[str, ...]
    airbench: Path | None


@dataclass(frozen=True)
class Plan:
    """The measurements of a benchmark.

    Attributes:
        out: File to which children write their results.
        cache: Folder for weights and pixels.
        has_rival: Whether an interpreter with torch exists.
        limits: Time limits by prefix of keys. They replace the usual limits of the children.
    """

    scale: Scale
    cifar: Cifar
    table: Table
    out: Path
    cache: Path
    has_rival: bool
    limits: tuple[tuple[str, float], ...] = ()

    def pending(self, part: str) -> list[Measurement]:
        """Return the missing measurements of a part, in order. Raises NotRun."""
        makers = {"facts": self._facts, "gate": self._gate, "batches": self._batches, "rounds": self._rounds}
        makers |= {"variants": self._variants, "trace": self._trace, "cifar": self._cifar}
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

    @property
    def label(self) -> str:
        """Name of the recipe in keys."""
        return " ".join([Path(self.cifar.recipe).stem, *self.cifar.settings])

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
            yield Measurement(f"variants/{case.network} {case.batch}", "jax_variants", 480, task, keys=VARIANTS)

    def _trace(self) -> Iterator[Measurement]:
        if self.cifar.data is not None:
            yield from self._pixels()
            words = (*self._recipe_words(), *self._trace_words("cifar"))
            yield Measurement(f"trace/{self.label}", "jax_cifar", 300, words=words)
        # With data for CIFAR-10 but no measured batch size, trace only CIFAR-10; the trace of the step needs the best
        # batch size.
        if self.cifar.data is None or self.speeds(OURS):
            batch, _ = self.best(OURS)
            task = replace(self._task(replace(self.scale.case, batch=batch)), steps=GATE_LOSSES)
            yield Measurement(f"trace/step {batch}", "jax_trace", 240, task, self._trace_words("step"))

    def _cifar(self) -> Iterator[Measurement]:
        if self.cifar.data is None:
            raise NotRun("no data; give them with --cifar DATA")
        yield from self._pixels()
        seeds = tuple(map(str, range(self.scale.seeds)))
        key = f"cifar/{self.label}/seed"
        yield Measurement(key, "jax_cifar", 480, words=self._recipe_words(), keys=seeds)
        if self.cifar.airbench is not None and self.has_rival:
            words = (str(self.cifar.airbench), "--data", str(self.pixels))
            words += ("--folder", str(self.cache / "airbench" / self.pixels.stem), "--out", str(self.out))
            key = f"cifar/{self.cifar.airbench.stem}/run"
            yield Measurement(key, "torch_airbench", 480, words=words, keys=seeds)

    # --- Helpers of the parts ---

    @property
    def pixels(self) -> Path:
        """The pixels that both contenders of CIFAR-10 get."""
        assert self.cifar.data is not None
        packed = self.cifar.digest is not None
        return self.cache / "data" / f"{self.cifar.digest}.pixels.npz" if packed else self.cifar.data

    def _pixels(self) -> Iterator[Measurement]:
        if self.cifar.digest is not None:
            words = ("unpack", str(self.cifar.data), str(self.pixels), "--tell", str(self.out))
            yield Measurement("cifar/pixels", "../gpu_data", 120, words=words, product=self.pixels)

    def _trace_words(self, name: str) -> tuple[str, ...]:
        """Return options that write traces beside the table."""
        return "--trace", str(self.table.path.absolute().with_suffix(".traces") / name)

    def _recipe_words(self) -> tuple[str, ...]:
        words = (self.cifar.recipe, "--data", str(self.pixels), "--out", str(self.out))
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
