"""Plans and reports survive the way through their fixed-size messages."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_hpc.transport.base import (
    HEADER_LEN,
    PlanKind,
    Segment,
    StepPlan,
    StepReport,
    decode_plan,
    decode_report,
    payload_words,
    report_words,
)

IDS = st.lists(st.integers(0, 2**62), max_size=20)
SEGMENTS = st.lists(st.builds(Segment, *[st.integers(0, 2**40)] * 6), max_size=20)


@given(st.sampled_from(PlanKind), st.integers(0, 2**40), IDS, IDS, IDS, SEGMENTS)
def test_plan_round_trip(kind, step, seq_ids, new, finished, segments) -> None:
    ids = np.array(seq_ids, np.int64)
    plan = StepPlan(
        kind, step, ids, ids // 3, ids // 5, np.array(new, np.int64), np.array(finished, np.int64), segments
    )
    header, payload = plan.header(), plan.payload()
    assert len(header) == HEADER_LEN
    assert header[6] == payload.nbytes == 8 * payload_words(header[2:6].tolist())
    back = decode_plan(header, payload)
    assert (back.kind, back.step, back.segments) == (kind, step, segments)
    for name in ("seq_ids", "owners", "positions", "new", "finished"):
        assert getattr(back, name).tolist() == getattr(plan, name).tolist()


def test_report_round_trip() -> None:
    times = np.arange(6.0)
    report = StepReport(0.25, 0.125, 0.5, 77, True, times - 10, times, times + 100, times - 20)
    words = np.zeros(report_words(6))
    report.encode(words)
    back = decode_report(words)
    assert (back.t_r_part, back.t_wait, back.free_blocks, back.stop_request) == (0.25, 0.5, 77, True)
    assert back.t_asked.tolist() == (times - 10).tolist()
    assert back.t_arrived.tolist() == times.tolist()
    assert back.t_posted.tolist() == (times + 100).tolist()
    assert back.t_before.tolist() == (times - 20).tolist()
