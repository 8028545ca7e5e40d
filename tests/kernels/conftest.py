"""Every kernel test runs once for each instruction set of this machine, then restores the one in use."""

import pytest
import torch

from fastdecode_hpc.isa import active_isa, available_isas, select_isa


@pytest.fixture(params=available_isas())
def isa(request):
    before = active_isa()
    select_isa(request.param)
    yield request.param
    select_isa(before)


@pytest.fixture
def restored():
    """Instruction set and threads of torch are afterwards as they were."""
    before = active_isa(), torch.get_num_threads()
    yield
    select_isa(before[0])
    torch.set_num_threads(before[1])
