"""Cases of a parametrized test: the telling ones in every run, the others in `make test-all`."""

from typing import Any

import pytest
from hypothesis import settings


def rarely(*values: Any) -> Any:
    """A case of `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def few(telling: tuple, *others: Any) -> list:
    """Of one argument the values that tell, and others that prove the same again."""
    return [*telling, *map(rarely, others)]


dear = settings(max_examples=settings.default.max_examples // 2)
"""For a property of which each example compiles something: half of the examples of others."""
