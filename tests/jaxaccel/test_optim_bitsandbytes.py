"""Mode "bitsandbytes" against the package itself, where that is installed.

    uv pip install bitsandbytes torch packaging
    uv run --no-sync pytest tests/jaxaccel/test_optim_bitsandbytes.py

(No dependency group: locking PyTorch would take JAX's CUDA libraries back to its older ones.)

On a CPU the package's quantiser of float32 does not find the nearest code. Since 0.50 it looks
values up in a table of 65,536 cells of [-1, 1], which is coarser than the codes of small numbers,
and before it took -1 for the least code. Arrays of float64 go the package's exact way, as all do
on CUDA. What is shown here is identity with that, and with the table once values are moved to the
middle of their cell. Its AdamW is run with its exact way in the table's place: with the table 82 %
of the first and 22 % of the second moments' codes are left after 50 steps, and that is the table.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import optim
from jaxaccel.blockwise import dequantize_blockwise, in_blocks, quantize_blockwise
from jaxaccel.optim_8bit import Moments
from pallas_kernels import codes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reason = (
        "compares with a package that is not installed: uv pip install bitsandbytes torch packaging"
    )
    torch = pytest.importorskip("torch", reason=reason)
    bnb = pytest.importorskip("bitsandbytes", reason=reason)
    from bitsandbytes.backends.cpu import ops

SHAPES = [(100_003,), (37, 1000), (64, 512), (5,)]
MAPS = {"dynamic": True, "dynamic_unsigned": False}


def values(shape, code, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x.reshape(-1)[256:512] = 0  # a block of zeros
    return np.float32(np.abs(x) if code == "dynamic_unsigned" else x)


@pytest.mark.parametrize("code", MAPS)
def test_the_maps_are_the_packages_up_to_its_rounding(code):
    theirs = bnb.functional.create_dynamic_map(signed=MAPS[code]).numpy()
    ulps = np.abs(theirs.view(np.int32) - codes.table(code).view(np.int32))
    assert ulps.max() <= 2


@pytest.mark.parametrize("code", MAPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_are_identical(shape, code):
    x = values(shape, code)
    table = bnb.functional.create_dynamic_map(signed=MAPS[code])
    theirs, absmax = torch.ops.bitsandbytes.quantize_blockwise(
        torch.from_numpy(x).double(), table, 256
    )
    ours = quantize_blockwise(jnp.asarray(x), 256, code)
    np.testing.assert_array_equal(ours.codes, theirs.numpy())
    np.testing.assert_array_equal(ours.scale.reshape(-1), absmax.numpy())
    back = torch.ops.bitsandbytes.dequantize_blockwise(theirs, absmax, table, 256, torch.float32)
    np.testing.assert_allclose(dequantize_blockwise(ours), back.numpy(), rtol=3e-7)


@pytest.mark.parametrize("code", MAPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_its_table_on_the_cpu_has_the_codes_of_the_middles_of_its_cells(shape, code):
    x = values(shape, code)
    table = torch.from_numpy(codes.table(code).copy())
    theirs, absmax = torch.ops.bitsandbytes.quantize_blockwise(torch.from_numpy(x), table, 256)
    scale = absmax.numpy()[:, None]
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    normed = np.asarray(in_blocks(jnp.asarray(x), 256)).reshape(-1, 256) * inverse
    cell = np.floor((normed + np.float32(1)) * np.float32(0.5 * 65535) + np.float32(0.5))
    middle = np.float32(-1) + np.float32(2) * cell.astype(np.float32) / np.float32(65535)
    ours = np.where(scale == 0, 0, codes.encode(jnp.asarray(middle), code)).reshape(-1)[: x.size]
    unlike = ours != theirs.numpy().reshape(-1)
    assert unlike.mean() < 1e-4  # it rounds cells with a fused multiply and add


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fifty_steps_of_its_adamw_end_in_the_same_codes(monkeypatch, weight_decay):
    def exact(x, code, absmax_out, out, blocksize):
        out_, absmax = torch.ops.bitsandbytes.quantize_blockwise(x.double(), code, blocksize)
        out.copy_(out_)
        absmax_out.copy_(absmax)

    monkeypatch.setattr(ops, "_quant_blockwise_fp32_direct", exact)
    rng = np.random.default_rng(0)
    shape = (96, 1000)  # blocks run across the rows
    start, spread = rng.normal(size=shape), np.exp(2 * rng.normal(size=shape))
    theirs = torch.nn.Parameter(torch.from_numpy(np.float32(start)))
    numbers = {"eps": 1e-8, "weight_decay": weight_decay}
    package = bnb.optim.AdamW8bit([theirs], lr=1e-3, betas=(0.9, 0.999), **numbers)
    ours = jnp.asarray(start, jnp.float32)
    moments = Moments(mode="bitsandbytes")
    optimizer = optim.adamw_8bit(1e-3, 0.9, 0.999, moments=moments, **numbers)
    update, state = jax.jit(optimizer.update), optimizer.init(ours)
    for _ in range(50):
        gradient = np.float32(1e-2 * spread * rng.normal(size=shape))
        theirs.grad = torch.from_numpy(gradient)
        package.step()
        updates, state = update(jnp.asarray(gradient), state, ours)
        ours = ours + updates
    held = package.state[theirs]
    for moment, key in ((state[0].mu, "1"), (state[0].nu, "2")):
        got, want = np.asarray(moment.codes, np.int32), held["state" + key].numpy().astype(np.int32)
        assert np.abs(got - want).max() <= 1
        assert (got == want).mean() >= 0.999
        np.testing.assert_allclose(moment.scale, held["absmax" + key].numpy(), rtol=1e-5)
    # Where codes differ, updates do. On the CPU the package decays before the update, here after
    # it, as on CUDA: less than 1e-7 a step.
    assert (np.abs(ours - theirs.detach().numpy()) < 2e-5).mean() > 0.9
