"""The division of a batch into microbatches, compared with an enumeration of all divisions."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jaxddp.config import Config
from jaxddp.data.batch import Division

DIVISIONS = st.builds(
    Division,
    batch_size=st.integers(1, 200),
    shares=st.integers(1, 6),
    accumulate=st.integers(1, 6),
    group_size=st.integers(1, 4),
)


def microbatch_sizes(division: Division) -> list[int]:
    """Return the number of examples in each microbatch, when the examples are dealt out in turn."""
    sizes = [0] * (division.shares * division.accumulate)
    for example in range(division.batch_size):
        sizes[example % len(sizes)] += 1
    return sizes


@given(DIVISIONS)
def test_a_batch_divides_evenly_if_all_microbatches_are_equal_and_hold_whole_groups(division):
    sizes = microbatch_sizes(division)
    expected = min(sizes) == max(sizes) > 0 and sizes[0] % division.group_size == 0
    assert division.is_even == expected
    if expected:
        assert division.microbatch == sizes[0]


@given(DIVISIONS)
def test_finer_divisions_are_all_even_divisions_into_more_microbatches_in_order(division):
    counts = range(division.accumulate + 1, division.batch_size + 2)
    expected = [candidate for count in counts if (candidate := replace(division, accumulate=count)).is_even]
    assert list(division.finer_divisions()) == expected


@given(DIVISIONS, st.integers(0, 200))
def test_the_largest_batch_that_fits_is_the_largest_smaller_batch_that_divides_evenly(division, most):
    smaller = [replace(division, batch_size=size) for size in range(1, division.batch_size)]
    fitting = [candidate for candidate in smaller if candidate.is_even and candidate.batch_size <= most]
    largest = division.largest_that_fits(lambda candidate: candidate.batch_size <= most)
    assert largest == (fitting[-1] if fitting else None)


def test_a_config_determines_how_its_batch_is_divided():
    config = Config().replace(train={"batch_size": 96, "accumulate": 3})
    assert Division.of(config, 4) == Division(96, 4, 3, 1)
    for kind in ("mixup", "cutmix"):
        mixing = config.replace(data={"augment": {kind: 0.2}})
        # 96 examples in 4 x 3 microbatches are 8 each. In 4 x 8 they are 3 each, which would separate a pair.
        assert [candidate.accumulate for candidate in Division.of(mixing, 4).finer_divisions()] == [4, 6, 12]
        assert Division.of(mixing.replace(model={"batch_norm": "ghost:3"}), 4).group_size == 6
