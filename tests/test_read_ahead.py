"""An iterator is read ahead by one value, in its order, and its errors are raised in their place."""

import threading

import pytest

from jaxddp.core.read_ahead import read_ahead


def test_a_value_is_computed_while_the_one_before_it_is_used():
    started = [threading.Event() for _ in range(3)]

    def values():
        for number, event in enumerate(started):
            event.set()
            yield number

    for number, value in enumerate(read_ahead(values())):
        assert value == number
        # Without a thread the next value would be computed only when it is requested.
        assert number == 2 or started[number + 1].wait(20)


def test_an_error_is_raised_after_the_values_before_it():
    ahead = read_ahead(1 // number for number in (1, -1, 0))
    assert [next(ahead), next(ahead)] == [1, -1]
    with pytest.raises(ZeroDivisionError):
        next(ahead)


def test_no_values():
    assert list(read_ahead([])) == []
