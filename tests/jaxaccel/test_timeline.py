"""Schedules with a known outcome: what is exposed is called exposed, what is hidden hidden."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import hlo, timeline
from pallas_kernels import target

X8 = target.parse("h200x8")
GPU = X8.gpu
MODEL = timeline.CostModel(X8)
LINK = GPU.nvlink_bandwidth * MODEL.link_efficiency
D = 4096


def mesh():
    return X8.mesh({"fsdp": 8})


def shape(*dims, spec=()):
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh(), P(*spec)))


def played(function, *arguments, model=MODEL):
    compiled = X8.compile(jax.jit(function), *arguments)
    return timeline.simulate(hlo.parse(compiled.as_text()), model)


def gathered(w):
    return lax.with_sharding_constraint(w, NamedSharding(mesh(), P()))


def test_an_all_gather_that_is_used_at_once_is_exposed():
    step = played(lambda x, w: x @ gathered(w), shape(2048, D), shape(D, D, spec=("fsdp",)))
    (transfer,) = step.transfers
    assert (transfer.kind, transfer.count, transfer.bytes) == ("all-gather", 1, 2 * D * D)
    assert transfer.seconds == pytest.approx(2 * D * D * 7 / 8 / LINK + MODEL.collective_latency)
    assert transfer.hidden_fraction == pytest.approx(0, abs=1e-9)
    matmul = 2 * 2048 * D * D / (GPU.bf16_flops * MODEL.matmul_efficiency)
    assert step.seconds == pytest.approx(transfer.seconds + matmul, rel=0.02)
    assert step.exposed_fraction == pytest.approx(transfer.seconds / step.seconds)


def test_an_all_gather_beside_matmuls_is_hidden():
    def program(x, w, v):
        for _ in range(4):
            x = jnp.tanh(x @ v)
        return x @ gathered(w)

    step = played(program, shape(2048, D), shape(D, D, spec=("fsdp",)), shape(D, D))
    (transfer,) = step.transfers
    assert transfer.hidden_fraction == pytest.approx(1)
    assert step.exposed_fraction == pytest.approx(0, abs=1e-9)
    drawn = [s for s in step.segments if s.stream == "communication"]
    assert sum(s.duration for s in drawn) == pytest.approx(transfer.seconds)
    assert not any(s.exposed for s in drawn)


def prefetched(x, w):
    """A loop over layers that gathers the next weight while it uses this one."""

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(P(), P(None, "fsdp")), out_specs=P(), check_vma=False
    )
    def program(x, w):
        gather = lambda part: lax.all_gather(part, "fsdp", tiled=True)

        def layer(carry, part):
            x, whole = carry
            following = gather(part)
            return (jnp.tanh(x @ whole), following), None

        (x, whole), _ = lax.scan(layer, (x, gather(w[0])), w[1:])
        return x @ whole

    return program(x, w)


def at_once(x, w):
    return lax.scan(lambda x, part: (jnp.tanh(x @ gathered(part)), None), x, w)[0]


@pytest.mark.parametrize(("program", "hidden"), [(prefetched, 6 / 7), (at_once, 0)])
def test_collectives_of_a_loop_count_by_its_trips(program, hidden):
    step = played(program, shape(D, D), shape(7, D, D, spec=(None, "fsdp")))
    (transfer,) = step.transfers
    assert (transfer.count, transfer.bytes) == (7, 7 * 2 * D * D)
    assert transfer.hidden_fraction >= hidden
    assert transfer.hidden_fraction <= hidden + 1e-9 or hidden
    exposed = sum(s.duration for s in step.segments if s.exposed)
    assert exposed == pytest.approx(transfer.exposed_seconds)
    assert exposed == pytest.approx(step.exposed_seconds)


COLLECTIVE = """HloModule m, is_scheduled=true, num_partitions=16
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
ENTRY %main (x: f32[1048576]) -> f32[1048576] {
  %x = f32[1048576]{0} parameter(0)
  ROOT %r = f32[1048576]{0} KIND(%x), GROUPS
}"""


@pytest.mark.parametrize(
    ("kind", "groups", "wire"),
    [
        ("all-reduce", "replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum", 2 * 3 / 4),
        ("all-to-all", "replica_groups=[2,8]<=[16]", 7 / 8),
        ("collective-permute", "source_target_pairs={{0,1},{1,0}}", 1),
        ("all-reduce", "replica_groups={{0},{1}}, to_apply=%sum", None),
    ],
)
def test_a_ring_inside_a_node(kind, groups, wire):
    module = hlo.parse(COLLECTIVE.replace("KIND", kind).replace("GROUPS", groups))
    step = timeline.simulate(module, MODEL)
    expected = wire * 4 * 2**20 / LINK + MODEL.collective_latency if wire is not None else 0
    assert step.seconds == pytest.approx(expected)
    assert step.exposed_seconds == pytest.approx(expected)


def test_a_ring_over_two_nodes_is_as_fast_as_their_adapters():
    two = timeline.CostModel(target.parse("h200x2x8"))
    network = GPU.network_bandwidth * two.link_efficiency

    def seconds(groups):
        text = COLLECTIVE.replace("KIND", "all-reduce").replace("GROUPS", groups)
        return timeline.simulate(hlo.parse(text), two).seconds - two.collective_latency

    pairs = seconds("replica_groups=[8,2]<=[2,8]T(1,0), to_apply=%sum")
    assert pairs == pytest.approx(2 * 1 / 2 * 4 * 2**20 / network)
    # All sixteen: eight adapters of each node work at once.
    everyone = seconds("replica_groups=[1,16]<=[16], to_apply=%sum")
    assert everyone == pytest.approx(2 * 15 / 16 * 4 * 2**20 / (8 * network))


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("replica_groups={{1,3},{0,2}}", (1, 3)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}", (0, 1, 4, 5)),
        ("replica_groups={}", tuple(range(8))),
        ("source_target_pairs={{0,1},{7,0}}", (7, 0)),
    ],
)
def test_groups(groups, members):
    text = COLLECTIVE.replace("KIND", "all-reduce").replace("GROUPS", groups)
    assert timeline.group(hlo.parse(text).computations["main"].root, 8) == members


def test_unknown_groups_are_refused():
    text = COLLECTIVE.replace("KIND", "all-reduce").replace("GROUPS", "replica_groups=<new>")
    with pytest.raises(ValueError, match="cannot read the replica groups of r"):
        timeline.simulate(hlo.parse(text), MODEL)


ASYNC = """ENTRY %main (x: f32[1048576], y: f32[1048576]) -> f32[1048576] {
  %x = f32[1048576]{0} parameter(0)
  %y = f32[1048576]{0} parameter(1)
  %s = ((f32[1048576]{0}), f32[1048576]{0}) collective-permute-start(%x), \
source_target_pairs={{0,1}}, backend_config={"is_sync":SYNC}
  %n = f32[1048576]{0} negate(%y)
  %d = f32[1048576]{0} collective-permute-done(%s)
  ROOT %a = f32[1048576]{0} add(%d, %n)
}"""


@pytest.mark.parametrize("sync", [False, True])
def test_a_transfer_hides_behind_what_stands_between_start_and_done(sync):
    step = timeline.simulate(hlo.parse(ASYNC.replace("SYNC", str(sync).lower())), MODEL)
    (transfer,) = step.transfers
    memory = GPU.memory_bandwidth * MODEL.memory_efficiency
    negate, add = 2 * 4 * 2**20 / memory, 3 * 4 * 2**20 / memory
    hidden = 0 if sync else negate
    assert transfer.exposed_seconds == pytest.approx(transfer.seconds - hidden)
    assert step.seconds == pytest.approx(transfer.seconds - hidden + negate + add)


def test_a_loop_reads_its_slice_of_a_stack_and_not_the_stack():
    """64 layers add one row each: the stack is read once in all, not 64 times."""
    one = timeline.CostModel(target.parse("h200"))
    rows, width = 64, 4 * 2**20
    program = lambda x, w: lax.scan(lambda x, row: (jnp.sin(x + row), None), x, w)[0]
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((width,), (rows, width))]
    compiled = one.target.compile(jax.jit(program), *arguments)
    step = timeline.simulate(hlo.parse(compiled.as_text()), one)
    per_row = 4 * width / GPU.memory_bandwidth / one.memory_efficiency
    assert 3 * rows * per_row <= step.seconds <= 6 * rows * per_row


def test_a_matmul_takes_the_longer_of_arithmetic_and_memory():
    one = timeline.CostModel(target.parse("h200"))

    def seconds(m, n, k, dtype):
        a, b = (jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (k, n)))
        compiled = one.target.compile(jax.jit(jnp.dot), a, b)
        return timeline.simulate(hlo.parse(compiled.as_text()), one).seconds

    large = seconds(D, D, D, jnp.bfloat16)
    assert large == pytest.approx(2 * D**3 / GPU.bf16_flops / one.matmul_efficiency, rel=0.01)
    assert seconds(D, D, D, jnp.float32) == pytest.approx(2 * large, rel=0.01)
    long = seconds(2**16, 2**10, 16, jnp.bfloat16)
    moved = 2 * (2**16 * 2**10 + 2**16 * 16 + 2**10 * 16)
    assert long == pytest.approx(moved / GPU.memory_bandwidth / one.memory_efficiency, rel=0.05)
