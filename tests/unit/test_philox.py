"""Random numbers of many rows at once against NumPy's own generator."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fastdecode_hpc.s_part.philox import uniform

LARGEST = 2**64 - 1
NAMES = st.tuples(*[st.integers(0, LARGEST)] * 4)  # seed, noise key, choice, index of the token


def uniform_of_one(seed: int, noise_key: int, choice: int, token_index: int) -> float:
    key, counter = np.array([seed, noise_key], np.uint64), np.array([0, 0, token_index, choice], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random()


@given(st.lists(NAMES, min_size=1, max_size=20))
@example([(LARGEST,) * 4, (0,) * 4])
def test_numbers_are_those_of_numpy(names: list[tuple[int, int, int, int]]) -> None:
    assert uniform(np.array(names, np.uint64)).tolist() == [uniform_of_one(*name) for name in names]


def test_everything_that_names_a_token_matters() -> None:
    names = [[1, 2, 3, 4], [9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9]]
    assert len(set(uniform(np.array(names, np.uint64)).tolist())) == len(names)
