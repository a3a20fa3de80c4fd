"""What `benchmarks/gpu.py` measures: the children of each part, some of which follow from what the table holds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rivals.contenders.case import Case, Task
from benchmarks.rivals.contenders.jax_levers import LEVERS
from benchmarks.rivals.gpu_results import Table
from benchmarks.rivals.gpu_scale import EAGER, Scale

OURS, RIVAL = "jaxddp", "torch"
PRECISIONS = ("float32", "bfloat16")
GATE_LOSSES = 5


class NotRun(Exception):
    """A part that cannot be measured, and why."""


@dataclass(frozen=True)
class Measurement:
    """A child process, and the keys of its results.

    Attributes:
        script: in the contenders' folder.
        limit: its seconds.
        task: what a contender of steps is told; other scripts get `words`.
        keys: of several results, each below `key`; the script is told which are missing.
        product: a file that it makes, which is as necessary as its result.
        smaller: keys of the same with fewer images; where one ran out of memory, this would, too.
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
        """The keys of results that are not there; none where it failed."""
        if self.key in table.failures:
            return []
        if self.keys:
            return [f"{self.key}/{each}" for each in self.keys if f"{self.key}/{each}" not in table.measured]
        lost = self.product is not None and not self.product.is_file()
        return [self.key] if self.key not in table.measured or lost else []


@dataclass(frozen=True)
class Cifar:
    """What is trained to 94%, and how; `digest` is that of packed data, None where they are arrays already."""

    data: Path | None
    digest: str | None
    recipe: str
    settings: tuple[str, ...]
    airbench: Path | None


@dataclass(frozen=True)
class Plan:
    """Attributes:
    out: where children tell their results.
    cache: holds what is made once: weights and pixels.
    rival: whether there is a torch to compare with.
    limit: of every child, in place of its own.
    """

    scale: Scale
    cifar: Cifar
    table: Table
    out: Path
    cache: Path
    rival: bool
    limits: tuple[tuple[str, float], ...] = ()

    def waiting(self, part: str) -> list[Measurement]:
        """What is still to be measured of a part, in this order. Raises: NotRun."""
        makers = {"facts": self._facts, "gate": self._gate, "batches": self._batches, "rounds": self._rounds}
        makers |= {"levers": self._levers, "trace": self._trace, "cifar": self._cifar}
        return [self._limited(each) for each in makers[part]() if each.missing(self.table)]

    def best(self, name: str) -> tuple[int, str | None]:
        """The batch, and torch's mode, with the most images a second. Raises: NotRun; none was measured."""
        speeds = self.speeds(name)
        if not speeds:
            raise NotRun(f"no batch of {name} was measured; see the part batches")
        return max(speeds, key=lambda choice: speeds[choice])

    def speeds(self, name: str) -> dict[tuple[int, str | None], float]:
        """Images a second of each (batch, mode)."""
        found = self.table.below(f"batches/{name}/")
        chosen = {rest: (int(rest.split("/")[-1]), rest.split("/")[0] if "/" in rest else None) for rest in found}
        return {chosen[rest]: chosen[rest][0] / figures["step"] for rest, figures in found.items()}

    @property
    def label(self) -> str:
        """Of the recipe, in keys."""
        return " ".join([Path(self.cifar.recipe).stem, *self.cifar.settings])

    # --- The parts ---

    def _facts(self) -> Iterator[Measurement]:
        yield self._weights(self.scale.case)
        task = self._task(replace(self.scale.case, batch=self.scale.gate))
        yield Measurement(f"facts/{OURS}", "jax_facts", 240, task)
        if self.rival:
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
            # The order changes in every round, so that a drift of the machine favours no contender.
            for name in self._names()[:: 1 if number % 2 else -1]:
                batch, mode = self.best(name)
                task = replace(self._task(replace(self.scale.case, batch=batch)), variant=mode)
                kind = self.kind_of_rounds(name)
                yield self._step(f"{kind}/{number}", name, task)

    def kind_of_rounds(self, name: str) -> str:
        """What the keys of a contender's rounds begin with: rounds at another batch are others."""
        batch, mode = self.best(name)
        return f"rounds/{name}/{f'{mode} ' if mode else ''}{batch}"

    def _levers(self) -> Iterator[Measurement]:
        batch, _ = self.best(OURS)
        yield self._weights(self.scale.other)
        for case in (replace(self.scale.case, batch=batch), self.scale.other):
            task = replace(self._task(case), turns=self.scale.rounds)
            for lever in LEVERS:
                key = f"levers/{case.network} {case.batch}/{lever}"
                yield Measurement(key, "jax_levers", 300, replace(task, variant=lever))

    def _trace(self) -> Iterator[Measurement]:
        if self.cifar.data is not None:
            yield from self._pixels()
            words = (*self._recipe_words(), *self._trace_words("cifar"))
            yield Measurement(f"trace/{self.label}", "jax_cifar", 300, words=words)
        # CIFAR-10's trace needs no batch of the step, and is not lost with it.
        if self.cifar.data is None or self.speeds(OURS):
            batch, _ = self.best(OURS)
            task = replace(self._task(replace(self.scale.case, batch=batch)), steps=GATE_LOSSES)
            yield Measurement(f"trace/step {batch}", "jax_trace", 240, task, self._trace_words("step"))

    def _cifar(self) -> Iterator[Measurement]:
        if self.cifar.data is None:
            raise NotRun("--cifar PATH names the data")
        yield from self._pixels()
        seeds = tuple(map(str, range(self.scale.seeds)))
        key = f"cifar/{self.label}/seed"
        yield Measurement(key, "jax_cifar", 480, words=self._recipe_words(), keys=seeds)
        if self.cifar.airbench is not None and self.rival:
            words = (str(self.cifar.airbench), "--data", str(self.pixels))
            words += ("--folder", str(self.cache / "airbench" / self.pixels.stem), "--out", str(self.out))
            key = f"cifar/{self.cifar.airbench.stem}/run"
            yield Measurement(key, "torch_airbench", 480, words=words, keys=seeds)

    # --- Shared by the parts ---

    @property
    def pixels(self) -> Path:
        """What both contenders of CIFAR-10 are given."""
        assert self.cifar.data is not None
        packed = self.cifar.digest is not None
        return self.cache / "data" / f"{self.cifar.digest}.pixels.npz" if packed else self.cifar.data

    def _pixels(self) -> Iterator[Measurement]:
        if self.cifar.digest is not None:
            words = ("unpack", str(self.cifar.data), str(self.pixels), "--tell", str(self.out))
            yield Measurement("cifar/pixels", "../gpu_data", 120, words=words, product=self.pixels)

    def _trace_words(self, name: str) -> tuple[str, ...]:
        """Traces lie beside the table."""
        return "--trace", str(self.table.path.absolute().with_suffix(".traces") / name)

    def _recipe_words(self) -> tuple[str, ...]:
        words = (self.cifar.recipe, "--data", str(self.pixels), "--out", str(self.out))
        # The last of two counts.
        return (*words, "--set", *self.scale.settings, *self.cifar.settings)

    def _names(self) -> tuple[str, ...]:
        return (OURS, RIVAL) if self.rival else (OURS,)

    def _task(self, case: Case) -> Task:
        name = f"{case.network}-{case.stem}-{case.width}-{case.classes}.npz"
        scale = self.scale
        return Task(case, self.cache / "weights" / name, scale.steps, scale.turns, self.out, warmup=scale.warmup)

    def _weights(self, case: Case) -> Measurement:
        task, key = self._task(case), f"facts/weights of {case.network}"
        return Measurement(key, "jax_weights", 180, task, product=task.weights)

    def _step(self, key: str, name: str, task: Task) -> Measurement:
        # Inductor tunes every shape when it meets it first; the others mostly load and run.
        seconds = 560 if task.variant not in (None, EAGER) else 300
        return Measurement(key, f"{name}_step", seconds, task)

    def _limited(self, each: Measurement) -> Measurement:
        fitting = [seconds for beginning, seconds in self.limits if each.key.startswith(beginning)]
        return replace(each, limit=fitting[-1]) if fitting else each
