"""The length of a run and its cadences, in steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxddp.config import Config
from jaxddp.core.duration import Cadence, Duration
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key

_MOST_STEPS = 2**31 - 1
"""The step is an int32 in the state."""
_UNTRACED = 3
"""Steps that a profile leaves out, if it can: the first compiles, and the queue of steps fills."""


@dataclass(frozen=True)
class Plan:
    """When a run ends, and at the end of which steps it logs, validates and saves; an epoch's last step always logs."""

    num_examples: int
    batch_size: int
    total_steps: int
    log: Cadence
    evaluate: Cadence
    checkpoint: Cadence
    replicas: Cadence
    max_substituted: int
    """How many images of an epoch may be substituted."""
    profile: int
    """How many steps are traced."""
    max_bad_steps: int
    """After how many steps in a row without a finite gradient the run ends; 0 for the first, as without a guard."""

    @classmethod
    def of(cls, config: Config, num_examples: int) -> "Plan":
        """The plan of a config over a data set of N training examples.

        Raises:
            InputError: a run of no steps, or of more than a step counter holds.
        """
        sizes = {"num_examples": num_examples, "batch_size": config.train.batch_size}
        total = config.train.duration.steps(**sizes)
        if total < 1:
            raise InputError(
                Key("train.duration", config.train.duration, f'"{config.train.duration}"'),
                " is less than one step",
                advice='give at least "1 step"',
            )
        if total > _MOST_STEPS:
            raise InputError(
                Key("train.duration", config.train.duration, f'"{config.train.duration}"'),
                f" is {total:,} steps",
                advice=f"at most {_MOST_STEPS:,}",
            )

        def cadence(every: Duration) -> Cadence:
            return Cadence(every.examples(**sizes, total_steps=total), config.train.batch_size)

        return cls(
            **sizes,
            total_steps=total,
            log=cadence(config.log.every),
            evaluate=cadence(config.eval.every),
            checkpoint=cadence(config.checkpoint.every),
            replicas=cadence(config.parallel.check_replicas),
            profile=0 if config.log.profile is None else config.log.profile.steps(**sizes, total_steps=total),
            max_bad_steps=config.train.max_bad_steps,
            max_substituted=max_substituted(config.data.max_bad_images, num_examples),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """What turns a `Duration` of this run into steps or examples."""
        return {"num_examples": self.num_examples, "batch_size": self.batch_size, "total_steps": self.total_steps}

    def epoch(self, step: int) -> float:
        """How many epochs have been seen at the end of a step."""
        return step * self.batch_size / self.num_examples

    @property
    def epochs(self) -> Cadence:
        return Cadence(Fraction(self.num_examples), self.batch_size)

    def chunks(self, done: int, length: int, cuts: Sequence[int] = ()) -> Iterator[range]:
        """Cuts the steps that follow the first `done` into chunks that can be dispatched as one.

        A chunk is a range of steps counted from 0, as the order of examples counts them: after the chunk, `chunk.stop`
        steps are done. It is of `length` steps or of one; nothing is due before its end, and its steps are all traced
        or none. Without a profile, a run that goes on after any chunk cuts what follows as this one does. A chunk ends
        before each step of `cuts`, which needs another program.
        """
        traced = self.traced(done)
        while done < self.total_steps:
            dues = [cadence.following(done) for cadence in self._cadences]
            dues += [end for end in (traced.start - 1, traced.stop - 1) if traced and end > done]
            dues += [step for step in cuts if step > done]
            due = min(self.total_steps, *(due for due in dues if due is not None))
            yield from cut(range(done, due), length)
            done = due

    def chunk_length(self, longest: int) -> int:
        """The length of a full chunk: it makes the fewest dispatches between two turns of the shortest cadence."""
        between = [int(cadence.examples / self.batch_size) for cadence in self._cadences if cadence.examples]
        return full_length(max(1, min(between)), longest)

    @property
    def _cadences(self) -> tuple[Cadence, ...]:
        return self.log, self.evaluate, self.checkpoint, self.epochs

    def traced(self, done: int) -> range:
        """The steps, counted from 1, that are traced of a run that goes on after the first `done`; there may be none.

        They come after its first step, which compiles, and a few more, as long as enough are left then.
        """
        left = self.total_steps - done
        begin = done + 1 + max(1, min(_UNTRACED, left - self.profile))
        return range(begin, min(begin + self.profile, self.total_steps + 1))

    def last(self, step: int) -> bool:
        return step >= self.total_steps

    def logs(self, step: int) -> bool:
        return self.log.due(step) or self.epochs.due(step) or self.last(step)

    def evaluates(self, step: int) -> bool:
        """Validation also comes with the last step; where it is switched off there is nothing that evaluates."""
        return self.evaluate.due(step) or self.last(step)

    def saves(self, step: int) -> bool:
        return self.checkpoint.due(step) or self.last(step)

    def compares(self, before: int, step: int) -> bool:
        """Whether the replicas are compared at the end of a chunk of the steps after `before`, of which `step` is last.

        Unlike what else is due, it cuts no chunk: it comes at the first end of one.
        """
        return self.replicas.count(step) > self.replicas.count(before)


def full_length(steps: int, longest: int) -> int:
    """The length of full chunks, at most `longest`, by which so many steps are cut into the fewest."""
    return min(range(min(steps, longest), 0, -1), key=lambda length: sum(divmod(steps, length)))


def cut(steps: range, length: int) -> Iterator[range]:
    """Cuts steps into full chunks of `length`, as many as there are, and the rest into single ones."""
    full = len(steps) // length * length
    yield from (steps[at : at + length] for at in range(0, full, length))
    yield from (steps[at : at + 1] for at in range(full, len(steps)))


def max_substituted(share: float, num_examples: int) -> int:
    """How many of an epoch's images may be substituted, to the nearest number; at least 1 of a share above 0."""
    return max(round(share * num_examples), int(share > 0))
