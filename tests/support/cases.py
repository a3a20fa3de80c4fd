"""Cases of parametrized tests: essential cases always run, other cases in `make test-ci` or only in `make test-all`."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def ci_case(*values: Any) -> Any:
    """Return a case that `make test-ci` runs, and not `make test`."""
    return pytest.param(*values, marks=pytest.mark.ci)


def rare_case(*values: Any) -> Any:
    """Return a case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def essential_and_ci(essential: Sequence[Any], everything: Iterable[Any]) -> list:
    """Return the essential values of an argument, and the other values of all for `make test-ci`."""
    return [*essential, *(ci_case(value) for value in everything if value not in essential)]


def essential_and_rare(essential: tuple, *others: Any) -> list:
    """Return the essential values of an argument, and other values that only `make test-all` uses."""
    return [*essential, *map(rare_case, others)]


costly = settings(max_examples=settings.default.max_examples // 2)
"""Settings with half of the examples, for properties whose examples compile something."""
