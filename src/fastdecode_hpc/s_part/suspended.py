"""Calls that can be halted from deep inside, and gone on with later; the one home of greenlet.

Notes
-----
A model's forward pass is one call that asks for attention many times, from code that is not ours, so it can't be made
a generator. A greenlet has a stack of its own and is switched to by hand: one thing runs at a time, in the caller's
thread, in the order that the schedule says: 0.8 microseconds there and back. A thread for each pass could do the same
in 16, but torch would have a team of OpenMP threads, a number of threads, and a mode of its own in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet


class Suspended:
    """A call that has not begun, or is halted, or is done. One that is dropped while it is halted is unwound.

    Parameters
    ----------
    function : callable
        Without parameters; calls `halt` where it needs something from outside.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._greenlet = greenlet(lambda _: function())

    @property
    def is_done(self) -> bool:
        return bool(self._greenlet.dead)

    def resume(self, value: Any = None) -> Any:
        """Go on, with `value` as result of the `halt` it stands at, to the next; what that is given, or the result."""
        return self._greenlet.switch(value)


def halt(value: Any) -> Any:
    """From inside a suspended call: give `value` to whoever resumed it, and wait for what that one resumes it with."""
    outside = getcurrent().parent
    assert outside is not None, "this is not inside a suspended call"
    return outside.switch(value)
