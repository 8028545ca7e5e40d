"""Calls that are halted from deep inside."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastdecode_hpc.s_part.suspended import Suspended, halt


def summing(log: list[str], name: str) -> Callable[[], int]:
    def inside(value: int) -> int:
        try:
            return int(halt((name, value)))
        finally:
            log.append(name)

    return lambda: inside(1) + inside(2)


def test_calls_take_turns_and_end_with_their_result() -> None:
    log: list[str] = []
    a, b = Suspended(summing(log, "a")), Suspended(summing(log, "b"))
    assert a.resume() == ("a", 1)
    assert b.resume() == ("b", 1)
    assert b.resume(10) == ("b", 2)
    assert a.resume(1) == ("a", 2)
    assert not a.is_done
    assert (a.resume(2), b.resume(20)) == (3, 30)
    assert a.is_done
    assert log == ["b", "a", "a", "b"]


def test_an_error_inside_comes_out_where_the_call_was_resumed() -> None:
    def fail() -> None:
        halt(None)
        raise ValueError("inside")

    call = Suspended(fail)
    call.resume()
    with pytest.raises(ValueError, match="inside"):
        call.resume()
    assert call.is_done


def test_a_call_that_is_dropped_is_unwound() -> None:
    log: list[str] = []
    call = Suspended(summing(log, "a"))
    call.resume()
    del call
    assert log == ["a"]


def test_outside_of_a_call_nothing_can_be_halted() -> None:
    with pytest.raises(AssertionError, match="not inside a suspended call"):
        halt(None)
