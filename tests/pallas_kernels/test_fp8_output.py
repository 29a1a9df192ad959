"""The cast of the kernels is that of jaxaccel.numerics."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import numerics
from pallas_kernels.fp8_output import inverse_scale, to_fp8

EDGES = [0.0, -0.0, 1e-30, 2**-9, 447.9, 464.0, 465.0, -1e5, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-126, 3e38, 0.0, np.inf, np.nan])
def test_it_is_the_cast_of_numerics(scale):
    y = jnp.asarray([*EDGES, *np.random.default_rng(0).normal(size=500) * 300], jnp.float32)
    scale = jnp.float32(scale)
    got, want = to_fp8(y, inverse_scale(scale)), numerics.cast(y, scale, "e4m3")
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(jnp.uint8), want.view(jnp.uint8))
    assert np.isnan(got[9:12].astype(jnp.float32)).all()  # the last of EDGES
