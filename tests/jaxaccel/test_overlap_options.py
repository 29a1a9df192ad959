"""XLA's options that overlap sets: those that this XLA knows, and what they do."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
