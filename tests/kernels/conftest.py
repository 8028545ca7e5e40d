"""Every kernel test runs once for each instruction set of this machine, then restores the one in use."""

import pytest

from fastdecode_hpc.isa import active_isa, available_isas, select_isa


@pytest.fixture(params=available_isas())
def isa(request):
    before = active_isa()
    select_isa(request.param)
    yield request.param
    select_isa(before)
