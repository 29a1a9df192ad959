"""Bytes of instructions, and passes over arrays of a size, in programs written down here."""

import pytest

from jaxaccel import hlo, hlo_bytes

# A loop of 3 turns: a cast of one layer of a stack, a sum in place, and a matmul.
TEXT = """HloModule m, num_partitions=1

%fused (p0: bf16[3,8,4], p1: s32[]) -> f8e4m3fn[8,4] {
  %p0 = bf16[3,8,4]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = bf16[1,8,4]{2,1,0} dynamic-slice(%p0, %p1, %z, %z), dynamic_slice_sizes={1,8,4}
  %b = bf16[8,4]{1,0} bitcast(%s)
  ROOT %c = f8e4m3fn[8,4]{1,0} convert(%b)
}

%update (p0: f32[3,8,4], p1: f32[8,4], p2: s32[]) -> f32[3,8,4] {
  %p0 = f32[3,8,4]{2,1,0} parameter(0)
  %p1 = f32[8,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %z = s32[] constant(0)
  %b = f32[1,8,4]{2,1,0} bitcast(%p1)
  ROOT %u = f32[3,8,4]{2,1,0} dynamic-update-slice(%p0, %b, %p2, %z, %z)
}

%body (t: (s32[], bf16[3,8,4], f32[3,8,4])) -> (s32[], bf16[3,8,4], f32[3,8,4]) {
  %t = (s32[], bf16[3,8,4]{2,1,0}, f32[3,8,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[3,8,4]{2,1,0} get-tuple-element(%t), index=1
  %y = f32[3,8,4]{2,1,0} get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %f = f8e4m3fn[8,4]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused, metadata={op_name="cast"}
  %d = f32[8,4]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %w = f32[3,8,4]{2,1,0} fusion(%y, %d, %i), kind=kLoop, calls=%update
  ROOT %r = (s32[], bf16[3,8,4]{2,1,0}, f32[3,8,4]{2,1,0}) tuple(%next, %x, %w)
}

%condition (t: (s32[], bf16[3,8,4], f32[3,8,4])) -> pred[] {
  %t = (s32[], bf16[3,8,4]{2,1,0}, f32[3,8,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(3)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: (s32[], bf16[3,8,4], f32[3,8,4])) -> (s32[], bf16[3,8,4], f32[3,8,4]) {
  %a = (s32[], bf16[3,8,4]{2,1,0}, f32[3,8,4]{2,1,0}) parameter(0)
  ROOT %w = (s32[], bf16[3,8,4]{2,1,0}, f32[3,8,4]{2,1,0}) while(%a), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


@pytest.fixture
def module():
    return hlo.parse(TEXT.replace("\\\n", ""))


def test_of_what_is_sliced_only_the_slice_moves(module):
    body = module.computations["body"]
    moved = lambda name: hlo_bytes.moved(module, body, body.instructions[name])
    assert moved("f") == 2 * 32 + 4 + 32  # a layer in 16 bits, an index, eight bits out
    assert moved("w") == 2 * 4 * 32 + 4  # the update read and written, in place
    assert moved("d") == 2 * 32 + 4 * 32


def test_passes_leave_matmuls_out_and_count_turns(module):
    cast, update = hlo_bytes.passes(module, 32)
    assert (cast.name, cast.op_name, cast.reads, cast.writes, cast.bytes) == ("f", "cast", 1, 1, 96)
    assert (update.name, update.reads, update.writes, update.bytes) == ("w", 1, 1, 256)
    assert (cast.read_types, update.read_types) == (("bf16",), ("f32",))
    assert {cast.count, update.count} == {3} and not (cast.kernel or update.kernel)
    assert hlo_bytes.passes(module, 32, written="f8e4m3fn") == (cast,)
    assert hlo_bytes.passes(module, 33) == ()
