"""Schedules written down here, and one compiled, whose windows are known."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import hlo
from jaxaccel.windows import windows
from pallas_kernels import target

# A permutation in a loop of 3 turns; BETWEEN stands between its start and its done.
TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%gemm (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %d = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%plain (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %n = f32[64,64]{1,0} negate(%p)
}

%twice (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  %a = f32[64,64]{1,0} fusion(%p), kind=kCustom, calls=%gemm
  ROOT %b = f32[64,64]{1,0} fusion(%a), kind=kCustom, calls=%gemm
}

%inner (t: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %t = (s32[], f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64,64]{1,0} get-tuple-element(%t), index=1
  %y = f32[64,64]{1,0} fusion(%x), kind=kCustom, calls=%gemm
  ROOT %r = (s32[], f32[64,64]{1,0}) tuple(%i, %y)
}

%condition (t: (s32[], f32[64,64])) -> pred[] {
  %t = (s32[], f32[64,64]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%reduced (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %r = f32[64,64]{1,0} all-reduce(%p), replica_groups={}, to_apply=%sum
}

%body (t: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %t = (s32[], f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64,64]{1,0} get-tuple-element(%t), index=1
  %s = ((f32[64,64]{1,0}), f32[64,64]{1,0}) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,0}}, metadata={op_name="ring"}
  BETWEEN
  %e = f32[64,64]{1,0} collective-permute-done(%s)
  %after = f32[64,64]{1,0} fusion(%e), kind=kCustom, calls=%gemm
  ROOT %r = (s32[], f32[64,64]{1,0}) tuple(%i, %after)
}

ENTRY %main (t: (s32[], f32[64,64])) -> f32[64,64] {
  %t = (s32[], f32[64,64]{1,0}) parameter(0)
  %w = (s32[], f32[64,64]{1,0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %x = f32[64,64]{1,0} get-tuple-element(%w), index=1
  %g = f32[512,64]{1,0} all-gather(%x), replica_groups={}, dimensions={0}
  %f = ((f32[64,64]{1,0}), f32[64,64]{1,0}) fusion-start(%x), kind=kCustom, calls=%reduced
  %m = f32[512,64]{1,0} dot(%g, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %d = f32[64,64]{1,0} fusion-done(%f)
}
"""
RESULT = "%between = f32[64,64]{1,0}"
KERNEL = (
    RESULT + ' custom-call(%x), custom_call_target="mosaic_gpu_v2", backend_config="'
    'cost_estimate_json = {\\22flops\\22: FLOP, \\22bytes_accessed\\22: 8}"'
)


@pytest.mark.parametrize(
    ("between", "matmuls"),
    [
        (RESULT + " fusion(%x), kind=kLoop, calls=%plain", 0),
        (RESULT + " fusion(%x), kind=kCustom, calls=%gemm", 1),
        (RESULT + ' custom-call(%x, %x), custom_call_target="__cublas$gemm"', 1),
        (RESULT + " call(%x), to_apply=%twice", 2),
        (RESULT + " conditional(%i, %x, %x), branch_computations={%plain, %twice}", 2),
        ("%between = (s32[], f32[64,64]{1,0}) while(%t), condition=%condition, body=%inner", 1),
        (KERNEL.replace("FLOP", "64"), 1),
        (KERNEL.replace("FLOP", "0"), 0),
    ],
)
def test_what_lies_between_start_and_done(between, matmuls):
    found = {w.kind: w for w in windows(hlo.parse(TEXT.replace("BETWEEN", between)))}
    ring = found["collective-permute"]
    assert (ring.matmuls, ring.synchronous, ring.op_name) == (matmuls, False, "ring")
    assert (ring.count, ring.bytes) == (3, 4 * 64 * 64)
    gather = found["all-gather"]
    assert (gather.synchronous, gather.matmuls, gather.count) == (True, 0, 1)
    assert gather.bytes == 4 * 512 * 64
    # One that XLA wrapped in a fusion counts once, by its caller.
    assert (found["all-reduce"].matmuls, found["all-reduce"].synchronous) == (1, False)
    assert len(windows(hlo.parse(TEXT))) == 3


@pytest.mark.target
@pytest.mark.parametrize("tied", [True, False])
def test_a_compiled_ring_step_hides_its_transfer_only_if_it_comes_first(tied):
    gpus = target.parse("h200x8")
    mesh = gpus.mesh({"tensor": 8})

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("tensor"), P()), out_specs=P("tensor"))
    def step(x, w):
        source = x if tied else x @ w
        received = lax.ppermute(source, "tensor", [(i, (i - 1) % 8) for i in range(8)])
        own, received = lax.optimization_barrier((x @ w if tied else source, received))
        return own + received @ w

    shapes = [
        jax.ShapeDtypeStruct((n, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P(axis)))
        for n, axis in ((8192, "tensor"), (1024, None))
    ]
    (window,) = windows(hlo.parse(gpus.compile(step, *shapes).as_text()))
    assert (window.kind, window.bytes) == ("collective-permute", 2 * 1024 * 1024)
    assert (window.matmuls > 0, window.synchronous) == (tied, not tied)
