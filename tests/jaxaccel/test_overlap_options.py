"""XLA's options that overlap sets: those that this XLA knows, and what they do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steps import DELAYED, EIGHT_BITS, Case

from jaxaccel import hlo, overlap, target, windows
from jaxaccel.overlap import options


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    assert options.known("xla_gpu_all_reduce_combine_threshold_bytes", 1)
    monkeypatch.setattr(options, "known", lambda name, value: "gather" not in name)
    assert set(overlap.compiler_options(7, 5)) == {
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
    }


@pytest.mark.target
def test_a_bucket_is_as_large_as_asked_for():
    on = target.parse("h200x2")
    mesh = on.mesh({"data": 2})
    sums = jax.shard_map(
        lambda xs: [jax.lax.psum(x, "data") for x in xs],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    xs = [
        jax.ShapeDtypeStruct((2, 2**18), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    ] * 4

    def buckets(size):  # of four gradients of 1 MiB
        step = jax.jit(sums, compiler_options=overlap.compiler_options(1, size))
        found = windows.windows(hlo.parse(on.compile(step, xs).as_text()))
        return sorted(window.bytes for window in found)

    assert buckets(2**23) == [2**22]
    assert buckets(2**21) == [2**21] * 2
    assert buckets(2**10) == [2**20] * 4


def test_on_cpus_collectives_have_one_order():
    """Without it the third line of this hung, or was NaN, in most runs."""
    wanted = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    assert overlap.in_order("cpu") == wanted and overlap.in_order("gpu") == {}
    case = Case("fsdp=8", "fsdp-prefetch", "selective", 3, EIGHT_BITS, DELAYED)
    made, given = steps.make(case), steps.make(case).place(steps.batch())
    assert wanted.items() <= made.compiler_options.items()
    assert steps.make(steps.alone(case)).compiler_options == {}

    def losses():
        state = made.warm_up(made.init(jax.random.key(0)), given)
        for _ in range(4):
            state, metrics = made.step(state, given)
            yield float(metrics.loss)

    first, again = list(losses()), list(losses())
    assert first == again and np.isfinite(first).all()
