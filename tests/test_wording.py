"""Counts, numbers and durations in the form that the package prints."""

import math

import pytest

from jaxddp.core.errors import counted, duration, figure, plural, some, span, speed


def test_the_noun_after_a_count_is_singular_or_plural():
    assert [counted(number, "file") for number in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
    nouns = ("class", "batch", "box", "try", "array", "epoch", "GPU")
    expected = ["classes", "batches", "boxes", "tries", "arrays", "epochs", "GPUs"]
    assert [plural(2, noun) for noun in nouns] == expected
    assert [plural(1, noun) for noun in nouns] == [*nouns]
    assert plural(0.5, "epoch") == "epochs"


def test_spans_lists_of_names_and_speeds_are_short_and_a_speed_is_not_rounded_to_zero():
    assert (span(4, 4), span(4, 1200)) == ("4", "4 to 1,200")
    assert [some(["a", "b", "c", "d"][:count]) for count in (0, 1, 3, 4)] == ["", "a", "a, b, c", "a, b, c, ..."]
    speeds = [*map(speed, (0, 0.0321, 0.32, 9.94, 9.96, 1234.5))]
    assert speeds == ["0", "0.032", "0.32", "9.9", "10", "1,234"]


def test_figures_have_their_significant_digits():
    figures = {"top1": 0.40366666, "val_ema top5": 1.0, "mean_class_accuracy": 0.5, "loss": 0.43211, "ece": 1.25e-6}
    assert [figure(*item) for item in figures.items()] == ["40.37%", "100.00%", "50.00%", "0.4321", "1.25e-06"]
    assert (figure("topology", 0.5), figure("count", 50000.0)) == ("0.5000", "50,000")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-"), (math.inf, "-"), (0.04, "0.0 s"), (8.21, "8.2 s"), (59.96, "1 min 00 s"), (200, "3 min 20 s")),
        *((3599.9, "1 h 00 min"), (7500.4, "2 h 05 min")),
    ],
)
def test_a_duration_has_its_two_largest_units_or_tenths_of_a_second(seconds, text):
    assert duration(seconds) == text
