"""exp of the softmax against float64."""

import numpy as np

from fastdecode_hpc._kernels import exp_nonpositive

LOWEST = np.float32(-87.3365)  # below it, exp is 0: results would no longer be normal floats
# Units in the last place. The worst of all floats in the range is 0.983 where a product is rounded before the sum
# (scalar), 1.011 where both are rounded once (the others).
MOST_ULP = 1.02


def test_error_over_the_whole_range(isa):
    # Every 61st float from -2^-30 to the lowest, by their bits; 61 is odd, so all patterns of the low bits come up.
    first, last = (np.float32(x).view(np.uint32) for x in (2**-30, -LOWEST))
    for start in range(int(first), int(last), 61 << 18):
        patterns = np.arange(start, min(start + (61 << 18), int(last)), 61, dtype=np.uint32)
        x = -patterns[: len(patterns) // 16 * 16].view(np.float32)
        exact = np.exp(x.astype(np.float64))
        unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
        error = np.abs(exp_nonpositive(x) - exact) / unit
        assert error.max(initial=0) <= MOST_ULP, x[error.argmax()]


def test_special_values(isa):
    below = np.nextafter(LOWEST, np.float32(-np.inf))
    x = np.array(
        [
            0.0,
            -0.0,
            -1e-45,
            -1e-38,
            -(2**-25),
            LOWEST,
            below,
            -88,
            -100,
            -1e4,
            -3e38,
            -np.inf,
            np.nan,
            -np.nan,
            -1,
            -87,
        ],
        np.float32,
    )
    got = exp_nonpositive(x)
    assert got[:4].tolist() == [1.0] * 4
    assert got[4] in (1.0, np.float32(1 - 2**-24))
    assert got[5] >= np.finfo(np.float32).tiny
    assert got[6:12].tolist() == [0.0] * 6
    assert np.isnan(got[12:14]).all()
    assert np.abs(got[14:] / np.exp(x[14:].astype(np.float64)) - 1).max() < 2**-22
