"""Ring attention compiled for eight H200s: what travels, beside what, and who does how much."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import hlo
from jaxaccel.overlap import ring_attention
from jaxaccel.windows import windows
from pallas_kernels import target
from pallas_kernels.attention import Mask

pytestmark = pytest.mark.target

X8 = target.parse("h200x8")
N, T, H, K, D = 8, 8192, 4, 2, 128
KV = (T // N) * K * 2 * D  # elements of one device's keys and values


@functools.cache
def compiled(causal, **mesh):
    """Forward and backward pass over packed rows, in bfloat16."""
    mesh = X8.mesh(mesh)
    row, heads = (
        P(None, "sequence"),
        P(None, "sequence", "tensor" if "tensor" in mesh.shape else None),
    )
    array = lambda *dims: jax.ShapeDtypeStruct(
        dims, jnp.bfloat16, sharding=NamedSharding(mesh, heads)
    )
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32, sharding=NamedSharding(mesh, row))

    def step(q, k, v, dout, ids):
        attend = lambda q, k, v, ids: ring_attention(
            q, k, v, "sequence", mask=Mask(causal, None, ids, ids), implementation="mosaic_gpu"
        )
        ring = jax.shard_map(attend, mesh=mesh, in_specs=(heads,) * 3 + (row,), out_specs=heads)
        return jax.vjp(lambda *x: ring(*x, ids), q, k, v)[1](dout)

    q, k = array(1, T, H, D), array(1, T, K, D)
    return hlo.parse(X8.compile(jax.jit(step), q, k, k, q, ids).as_text())


def sent(module):
    return [w for w in windows(module) if w.kind == "collective-permute"]


def test_every_transfer_has_a_kernel_beside_it():
    found = sent(compiled(True, sequence=N))
    assert all(w.matmuls and not w.synchronous and w.count == 1 for w in found), found
    # Keys and values forward; backward again, with their gradients, in float32, behind them.
    both = [2 * KV] * 2 + [2 * KV + 4 * KV] * (N - 3) + [4 * KV] * 2
    assert [w.bytes for w in found] == [2 * KV] * (N - 1) + both
    rest = [w for w in windows(compiled(True, sequence=N)) if w not in found]
    assert [(w.kind, w.bytes) for w in rest] == [("all-gather", 4 * T)]  # the segments


def test_without_a_causal_mask_and_beside_another_axis():
    n, kv = 4, KV * 2 // 2  # twice the rows, half the heads
    found = sent(compiled(False, tensor=2, sequence=n))
    assert all(w.matmuls and not w.synchronous for w in found), found
    both = [2 * kv] * 2 + [6 * kv] * (n - 3) + [4 * kv] * 2
    assert [w.bytes for w in found] == [2 * kv] * (n - 1) + both


@pytest.mark.parametrize(
    ("causal", "mesh"), [(True, {"sequence": 8}), (False, {"tensor": 2, "sequence": 4})]
)
def test_every_device_does_the_same_share_of_what_is_needed(causal, mesh):
    """All devices run one program without a branch, so each computes what its kernels state: in
    sum the pairs of the whole mask, none of which can be left out. Any surplus would show."""
    module = compiled(causal, **mesh)
    entry = module.computations[module.entry]
    assert not any(i.opcode in ("conditional", "while") for i in entry.instructions.values())
    done = sum(
        cost[0]
        for where in module.computations.values()
        for node in where.instructions.values()
        if (cost := hlo.kernel_cost(node))
    )
    pairs = H * (T * (T + 1) // 2 if causal else T * T)
    products = 2 + 3 + 4  # forward, dQ, and dK with dV
    assert N * done == 2 * D * products * pairs
