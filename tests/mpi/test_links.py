"""What messages take is measured to every rank."""

import pytest

from fastdecode_hpc.bench.rank_speeds import fit_link

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


def test_every_rank_is_asked_in_every_size(world) -> None:
    from fastdecode_hpc.transport.mpi_links import SIZES, measure_links

    found = measure_links(world, rounds=3)
    if not world.is_s_rank:
        assert found is None
        return
    assert sorted(found) == list(range(1, world.size))
    for messages in found.values():
        assert [size for size, _ in messages] == list(SIZES)
        latency, rate = fit_link(messages)
        assert 0 < latency < 10 and rate > 0
