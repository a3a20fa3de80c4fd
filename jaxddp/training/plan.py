"""The length of a run and its cadences, in steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxddp.config import Config
from jaxddp.core.duration import Cadence, Duration
from jaxddp.core.errors import InputError, Key
from jaxddp.schedules import Steps

_MAX_STEPS = 2**31 - 1
"""The largest step that the state can hold: its step is an int32."""
_NEVER = Cadence(Fraction(0), 1)


@dataclass(frozen=True)
class Plan:
    """The length of a run, and the cadences of its actions. The last step of an epoch is always logged."""

    num_examples: int
    batch_size: int
    total_steps: int
    log: Cadence
    evaluate: Cadence
    checkpoint: Cadence
    replicas: Cadence
    """If a comparison of the replicas is due within a chunk, they are compared after the chunk."""
    max_substituted: int
    """The largest number of images that may be substituted in an epoch."""
    profile: int
    """The number of steps to trace with the profiler."""
    max_bad_steps: int
    """The run ends after this many steps in a row without a finite gradient; 0 ends it at the first such step."""
    sync: Cadence = _NEVER
    """The meetings, at which parameters are averaged."""

    @classmethod
    def of(cls, config: Config, num_examples: int) -> "Plan":
        """Return the plan of a config for a data set of `num_examples` training examples.

        Raises: InputError if the run would have no step, or more steps than the step counter can hold.
        """
        train, sync, least = config.train, config.train.sync_every, 'give at least "1 step"'
        lengths = {"num_examples": num_examples, "batch_size": train.batch_size}
        duration = Key("train.duration", train.duration, f'"{train.duration}"')
        if train.duration.unit == "%":
            raise InputError(duration, " is a share of itself", advice="write it in epochs, steps or examples")
        total = train.duration.steps(**lengths)
        if total < 1:
            advice = f"{least}; `jaxddp eval WEIGHTS` measures weights without training"
            raise InputError(duration, " is less than one step", advice=advice)
        if total > _MAX_STEPS:
            raise InputError(duration, f" is {total:,} steps", advice=f"at most {_MAX_STEPS:,}")
        if sync is not None and not sync.amount:
            raise InputError(Key("train.sync_every", sync, f'"{sync}"'), " is no period", advice=least)
        lengths["total_steps"] = total

        def cadence(every: Duration) -> Cadence:
            return Cadence(every.examples(**lengths), train.batch_size)

        return cls(
            **lengths,
            log=cadence(config.log.every),
            evaluate=cadence(config.eval.every),
            checkpoint=cadence(config.checkpoint.every),
            replicas=cadence(config.parallel.check_replicas),
            profile=0 if config.log.profile is None else config.log.profile.steps(**lengths),
            max_bad_steps=train.max_bad_steps,
            max_substituted=max_substituted(config.data.max_bad_images, num_examples),
            sync=_NEVER if sync is None else cadence(sync),
        )

    @property
    def lengths(self) -> dict[str, int]:
        """The arguments that convert a `Duration` of this run to steps or examples."""
        return {"num_examples": self.num_examples, "batch_size": self.batch_size, "total_steps": self.total_steps}

    def schedule_steps(self, config: Config) -> Steps:
        """Return the lengths of the run, of its warmup and of its averaged part, in steps."""
        warmup, averaged = config.optimizer.warmup, config.train.swa
        return Steps(self.total_steps, warmup.steps(**self.lengths), averaged.steps(**self.lengths) if averaged else 0)

    def epoch(self, step: int) -> float:
        """Return the position in epochs after a number of steps."""
        return step * self.batch_size / self.num_examples

    @property
    def epochs(self) -> Cadence:
        return Cadence(Fraction(self.num_examples), self.batch_size)

    def chunks(self, done: int, length: int, cuts: Sequence[int] = ()) -> Iterator[range]:
        """Yield the steps after the first `done` in chunks, each of which is dispatched as one program.

        A chunk is a range of steps counted from 0: after the chunk, `chunk.stop` steps are done. A chunk has either
        `length` steps or a single step. Actions are due only at the end of a chunk, and either all or none of its steps
        are traced. Without a profile, a run that resumes after a chunk has the same later chunks as an uninterrupted
        run. At each step of `cuts` a new chunk begins, because the step needs another program, for example for larger
        images.
        """
        traced = self.traced(done)
        ends = [*cuts, traced.start - 1, traced.stop - 1] if traced else cuts
        while done < self.total_steps:
            due_steps = [*ends, *(cadence.following(done) for cadence in self._cadences)]
            due = min([self.total_steps, *(step for step in due_steps if step is not None and step > done)])
            yield from cut(range(done, due), length)
            done = due

    def chunk_length(self, longest: int) -> int:
        """Return the chunk length, at most `longest`, that needs the fewest dispatches for the shortest cadence."""
        between = [int(cadence.examples / self.batch_size) for cadence in self._cadences if cadence.examples]
        return full_length(max(1, min(between)), longest)

    @property
    def _cadences(self) -> tuple[Cadence, ...]:
        return self.log, self.evaluate, self.checkpoint, self.epochs, self.sync

    def traced(self, done: int) -> range:
        """Return the steps, from 1, that are traced in a run that starts after `done` steps; the range may be empty.

        They come after the first step, which compiles, and, if enough steps are left, after two more steps, which fill
        the queue of dispatched steps.
        """
        begin = done + 1 + max(1, min(3, self.total_steps - done - self.profile))
        return range(begin, min(begin + self.profile, self.total_steps + 1))

    def is_last(self, step: int) -> bool:
        return step >= self.total_steps

    def logs(self, step: int) -> bool:
        return self.log.due(step) or self.epochs.due(step) or self.is_last(step)

    def evaluates(self, step: int) -> bool:
        """Return whether validation is due after a step; it is always due after the last step.

        `fit` validates only if the run has an evaluator.
        """
        return self.evaluate.due(step) or self.is_last(step)

    def validations_from(self, step: int) -> int:
        """Return the number of validations that are due after a step and after all later steps."""
        last = self.total_steps
        return self.evaluate.count(last) - self.evaluate.count(step - 1) + (not self.evaluate.due(last))

    def saves(self, step: int) -> bool:
        return self.checkpoint.due(step) or self.is_last(step)

    def syncs(self, step: int) -> bool:
        """Return whether a meeting follows a step, which averages parameters."""
        return bool(self.sync.examples) and (self.sync.due(step) or self.is_last(step))


def full_length(steps: int, longest: int) -> int:
    """Return the chunk length, at most `longest`, with which `cut` divides a number of steps into the fewest chunks."""
    return min(range(min(steps, longest), 0, -1), key=lambda length: sum(divmod(steps, length)))


def cut(steps: range, length: int) -> Iterator[range]:
    """Yield steps in chunks of `length`, and the remaining steps as chunks of a single step."""
    full = len(steps) // length * length
    yield from (steps[at : at + length] for at in range(0, full, length))
    yield from (steps[at : at + 1] for at in range(full, len(steps)))


def max_substituted(share: float, num_examples: int) -> int:
    """Return the largest number of substituted images in an epoch: the rounded share, but 1 or more if `share` > 0."""
    return max(round(share * num_examples), int(share > 0))
