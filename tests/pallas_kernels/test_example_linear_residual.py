"""The three lanes of the worked example of pallas_kernels/README.md: one body, run in each."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend, build, target
from pallas_kernels import example_linear_residual as example

SHAPES = [(128, 64, 128), (128, 320, 256), (384, 576, 128)]  # rounds of the ring: part, one, two


def check(m, k, n):
    """At most twice the error of the same in plain JAX, both against float32."""
    keys = jax.random.split(jax.random.key(m), 3)
    shapes = (m, k), (k, n), (m, n)
    args = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]
    got = jax.jit(lambda *args: example.linear_residual(*args))(*args)
    wide = [x.astype(jnp.float32) for x in args]
    with jax.default_matmul_precision("highest"):
        exact = example.linear_residual_reference(*wide)
    error = lambda out: float(jnp.max(jnp.abs(out.astype(jnp.float32) - exact)))
    naive = args[2] + args[0] @ args[1]  # rounded twice, as separate kernels would
    assert 0 < error(got) <= 2 * error(naive)


@pytest.mark.parametrize("shape", SHAPES)
def test_simulated(shape):
    with backend.simulate():
        check(*shape)


@pytest.mark.parametrize("fence", ["commit_smem", "barrier_wait"])
def test_simulated_catches_a_missing_fence_or_barrier(monkeypatch, fence):
    monkeypatch.setattr(plgpu, fence, lambda *_: None)
    with pytest.raises(Exception, match="RACE DETECTED"), backend.simulate():
        check(*SHAPES[1])


def test_simulated_catches_a_wrong_result(monkeypatch):
    right = backend.accumulate
    monkeypatch.setattr(backend, "accumulate", lambda acc, a, b: 1.01 * right(acc, a, b))
    with pytest.raises(AssertionError), backend.simulate():
        check(*SHAPES[0])


@pytest.mark.target
def test_built():
    _, function, _, args, _, _ = next(example.cases())
    built = build.build(function, *args, target=target.parse("h200"))
    assert built.spill_bytes == 0
    assert built.shared_memory_bytes <= 227 * 1024
    assert built.wgmma_kinds == ("m64n128k16.f32.bf16.bf16",)
    assert not built.warnings


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 4096, 4096)])
def test_run(shape):
    check(*shape)


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((100, 64), (64, 128), (100, 128)), "bfloat16"),
        (((128, 96), (96, 128), (128, 128)), "bfloat16"),
        (((128, 64), (64, 128), (128, 128)), "float32"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, dtype):
    with pytest.raises(ValueError, match=rf"got {dtype}\[{shapes[0][0]}, .*need bfloat16"):
        example.linear_residual(*(jnp.zeros(s, dtype) for s in shapes))


def test_it_stays_under_a_hundred_lines():
    assert len(Path(example.__file__).read_text().splitlines()) < 100


def test_the_bytes_that_a_simulated_kernel_moves_are_counted():
    x, w, residual = (jnp.ones(s, jnp.bfloat16) for s in ((256, 128), (128, 128), (256, 128)))
    with backend.simulate(), backend.counted_traffic() as traffic:
        jax.block_until_ready(example.linear_residual(x, w, residual))
    tile = 2 * 128 * 128
    assert (traffic.loads, traffic.stores) == (2 * 3 * tile, 2 * tile)  # x, w, residual a block
    assert traffic.load_count == 2 * (1 + 2 * 2)  # x and w in halves of the 128 of K
