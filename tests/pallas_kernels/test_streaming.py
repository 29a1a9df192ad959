"""The frame of the streaming kernels: sizes, and that its faults come out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend, streaming


def double(x, plan):
    """Twice x, in place."""

    def twice(state, row, inputs, outputs, shared, numbers, extra):
        outputs[0][...] = 2 * inputs[0][...]
        return state

    return streaming.stream(twice, [x], [streaming.Output(x.dtype, 0)], plan)[0]


def check(rows, plan):
    x = jnp.arange(rows * 256, dtype=jnp.float32).reshape(rows, 2, 128)
    with backend.simulate():
        np.testing.assert_array_equal(jax.jit(lambda x: double(x, plan))(x), 2 * x)


@pytest.mark.parametrize("rows", [1, 4, 5, 13])
def test_each_row_is_met_once(rows):
    """Warpgroups with no row, with fewer than buffers, with a ring gone round twice."""
    check(rows, streaming.Plan(blocks=1, warpgroups=2, stages=2))


@pytest.mark.parametrize("gone", ["barrier_wait", "commit_smem", "wait_smem_to_gmem"])
def test_without_a_wait_or_a_fence_it_races(gone, monkeypatch):
    monkeypatch.setattr(plgpu, gone, lambda *_, **__: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        check(9, streaming.Plan(blocks=1, warpgroups=1, stages=2))


def test_a_row_left_out_is_seen(monkeypatch):
    right = streaming.lax.div
    monkeypatch.setattr(streaming.lax, "div", lambda a, b: right(a, b) - 1)
    with pytest.raises(AssertionError):
        check(5, streaming.Plan(blocks=1, warpgroups=1, stages=2))


@pytest.mark.parametrize(
    ("length", "columns", "chunk"),
    [
        (1, 128, 1),
        (123, 128, 1),
        (129, 256, 2),
        (1000, 1024, 8),
        (1025, 1280, 2),
        (12288, 12288, 16),
    ],
)
def test_rows_of_any_length_become_lines(length, columns, chunk):
    assert streaming.padded(length) == columns
    parts = streaming.chunks(columns)
    assert [p.start for p in parts] == list(range(0, columns // 128, chunk))
    assert {p.size for p in parts} == {chunk}


def test_plans_fill_shared_memory_and_no_more():
    for columns in range(512, 12289, 512):
        row, block = 6 * columns, 4 * columns
        plan = streaming.plan(4096, row, block)
        assert plan.fits and plan.blocks == streaming.CORES
        assert plan.warpgroups * plan.stages * row + block <= 219 * 1024
    assert not streaming.plan(4096, 150 * 1024, 0).fits
    assert streaming.plan(3, 1024, 0).blocks == 1
