"""Values are computed ahead of their use, in order, and errors are raised in their place."""

import threading

import pytest

from jaxddp.core.threads import map_in_threads


def test_a_value_is_computed_while_the_one_before_it_is_used():
    started = [threading.Event() for _ in range(3)]

    def work(number: int) -> int:
        started[number].set()
        return number

    for number, value in enumerate(map_in_threads(work, range(3), ahead=1)):
        assert value == number
        # Without a thread the next value would be computed only when it is requested.
        assert number == 2 or started[number + 1].wait(20)


def test_an_error_is_raised_after_the_values_before_it():
    ahead = map_in_threads(lambda number: 1 // number, (1, -1, 0), ahead=1)
    assert [next(ahead), next(ahead)] == [1, -1]
    with pytest.raises(ZeroDivisionError):
        next(ahead)
    assert list(map_in_threads(str, [])) == []
