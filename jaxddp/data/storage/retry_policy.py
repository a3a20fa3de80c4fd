"""`RetryPolicy`: the deadline of requests to a remote store, and the failures after which a request is repeated."""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.wording import counted, show

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0
# Requests to the key services of Amazon's and Google's machines; obstore makes them only if no keys are set.
_KEY_SERVICE = re.compile("/latest/api/token|/latest/meta-data/|/computeMetadata/")


class TemporaryFailure(Exception):
    """A failure after which a request is repeated, such as a lost connection."""


class IncompleteResponse(TemporaryFailure):
    """The server answered, but the body is cut short, is not complete at the deadline, or is not the expected one."""


@dataclass(frozen=True)
class RetryPolicy:
    """The time and the number of tries after which a request for an object fails."""

    deadline: float = 60.0
    """Seconds for all tries and the pauses between them."""
    read_timeout: float = 20.0
    """Seconds without a byte after which a try ends; the last try may end this long after the deadline."""
    tries: int = 10

    def call(self, name: str, attempt: Callable[[float], T], deadline: float, advice: str) -> T:
        """Return the result of `attempt`, which is called again after a temporary failure.

        The pauses between tries double. Each pause is shortened by up to a half at random, so many hosts do not retry
        at the same time.

        Args:
            name: the object to fetch, for messages.
            attempt: a function that takes the time, as of time.monotonic(), by which it should return or raise.
            deadline: the seconds for all tries; it replaces the attribute, because text files need more time.
            advice: the advice in the message of a permanent failure, and of an incomplete answer.

        Raises:
            FileNotFoundError: the attempt raised it.
            InputError: the failure is permanent, or the attempt raised it.
            Unreachable: no tries or no time is left.
        """
        start, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                return attempt(start + deadline)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise InputError(f"{name}: no such bucket; {advice}") from None
                raise
            except InputError:
                raise
            except Exception as error:
                is_temporary, reason = classify_error(error)
                has_body = isinstance(error, IncompleteResponse) or "IncompleteBody" in str(error)
            if not is_temporary:
                raise InputError(f"{name}: {reason}; {advice}")
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (tries - 1)) * random.uniform(0.5, 1)
            elapsed = time.monotonic() - start
            if tries >= self.tries or elapsed + pause > deadline:
                spent = f"{elapsed:.0f} s and {counted(tries, 'try')}"
                if has_body:
                    raise Unreachable(f"{name}: {reason} (after {spent}); start again, or {advice}")
                raise Unreachable(
                    f"{name}: no answer in {spent}, the last: {reason}; check that the store and the network are up, "
                    "and start again"
                )
            time.sleep(pause)


def classify_error(error: Exception) -> tuple[bool, str]:
    """Return whether a failure is temporary, and its cause in a few words, from the text of obstore's error."""
    if isinstance(error, TemporaryFailure):
        return True, str(error)
    text, _, detail = str(error).partition("Debug source:")
    keys = "no credentials are set, and the machine has none: " if _KEY_SERVICE.search(text) else ""
    if status := re.search(r"status code: (\d+)( [\w ]+)?", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        is_temporary = status[1].startswith("5") or status[1] in ("408", "429")
        return is_temporary, keys + status[1] + (status[2] or "") + (f" ({code[1]})" if code else "")
    if "BadScheme" in detail:
        return False, "plain http is not allowed unless AWS_ALLOW_HTTP=true is set"
    if "HTTP error" not in text:
        return False, show(re.sub(r"^Generic \w+ error: ", "", text.strip()))
    if "kind: Timeout" in detail:
        return True, f"{keys}no data arrived"
    if "IncompleteBody" in detail:
        return True, "the answer was cut short"
    message = re.search(r'(?:message|error): "([^"]+)"', detail)
    return True, keys + (message[1] if message else text.strip().rpartition(" - ")[2])
