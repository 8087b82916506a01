"""When to try a storage call again: a pure policy and the loop that follows it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Verdict(enum.Enum):
    """What a failure of one attempt asks for."""

    RETRY = "retry"
    REFRESH = "refresh"
    """The credentials have run out: build the client anew, then retry."""
    GIVE_UP = "give up"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter inside a budget of time."""

    budget_s: float = 60.0
    """No attempt starts later than this after the first failure of the call, in seconds."""

    first_delay_s: float = 0.2
    """Longest wait after the first failure; it doubles with each further one."""

    max_delay_s: float = 10.0
    """No wait is longer than this."""

    max_refreshes: int = 3
    """How often in one call new credentials are looked for."""

    def delay_s(self, *, num_failures: int, elapsed_s: float, jitter: float) -> float | None:
        """Return the wait before the next attempt, or None when the budget does not allow one.

        Pure. Between half and all of the exponential value, so that clients
        which failed together do not come back together.

        Args:
            num_failures: Failed attempts of this call so far, at least 1.
            elapsed_s: Since the first failure.
            jitter: A random number in [0, 1).
        """
        exponent = min(num_failures - 1, 30)
        ceiling_s = min(self.max_delay_s, self.first_delay_s * 2.0**exponent)
        wait_s = ceiling_s * (0.5 + 0.5 * jitter)
        return wait_s if elapsed_s + wait_s <= self.budget_s else None


PATIENT = RetryPolicy(budget_s=1800.0)
"""For the start of workers that have trained before: ending would lose what waiting does not."""


def run_with_retries(
    attempt: Callable[[], T],
    *,
    policy: RetryPolicy,
    judge: Callable[[Exception], Verdict],
    refresh: Callable[[], None],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    random: Callable[[], float],
    on_retry: Callable[[Verdict, Exception, float], None],
) -> T:
    """Return ``attempt()``, tried again as ``policy`` and ``judge`` say.

    Blocks for the attempts and at most ``policy.budget_s`` between them.

    Raises:
        Exception: The last failure of ``attempt``, or what ``sleep`` or
            ``refresh`` raise.
    """
    # From the first failure on: a large part that fails at its end has had a fair
    # try, and still deserves another.
    failed_s: float | None = None
    num_failures = num_refreshes = 0
    while True:
        try:
            return attempt()
        except Exception as error:
            num_failures += 1
            failed_s = clock() if failed_s is None else failed_s
            verdict = judge(error)
            num_refreshes += verdict is Verdict.REFRESH
            wait_s = policy.delay_s(num_failures=num_failures, elapsed_s=clock() - failed_s, jitter=random())
            if verdict is Verdict.GIVE_UP or wait_s is None or num_refreshes > policy.max_refreshes:
                raise
            on_retry(verdict, error, clock() - failed_s)
        sleep(wait_s)
        if verdict is Verdict.REFRESH:
            refresh()
