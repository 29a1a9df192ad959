"""Activations of programs that save a known number of bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import hlo, memory
from pallas_kernels import target

H200, H200X8 = target.parse("h200"), target.parse("h200x8")
L, B, D, F = 6, 136, 264, 520  # layers, rows, width, hidden width
POLICIES = jax.checkpoint_policies
X, HIDDEN = 2 * B * D, 2 * B * F  # bytes of a layer's input and of its hidden layer


def weights(layers=L, sharding=None):
    up = jax.ShapeDtypeStruct((layers, D, F), jnp.bfloat16, sharding=sharding)
    down = jax.ShapeDtypeStruct((layers, F, D), jnp.bfloat16, sharding=sharding)
    return up, down


def layer(x, w):
    hidden = checkpoint_name(x @ w[0], "hidden")
    return x + jnp.tanh(hidden) @ w[1], None


def loss(x):
    return jnp.sum(x.astype(jnp.float32) ** 2)


def saved(function, *arguments, of=H200):
    compiled = of.compile(jax.jit(jax.grad(function)), *arguments)
    found = memory.activations(hlo.parse(compiled.as_text()), ("x",))
    return compiled, found


def device_bytes(found):
    return sum(s.shape.bytes for s in found if not s.shape.host)


@pytest.mark.parametrize(
    ("policy", "per_layer"),
    [
        (POLICIES.nothing_saveable, X),
        (POLICIES.save_only_these_names("hidden"), X + HIDDEN),
        # The tanh twice: as the second matmul's operand, and within its own derivative.
        (POLICIES.everything_saveable, X + 2 * HIDDEN),
    ],
)
def test_a_scan_saves_what_its_policy_says(policy, per_layer):
    body = jax.checkpoint(layer, policy=policy)
    x = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    _, found = saved(lambda w, x: loss(lax.scan(body, x, w)[0]), weights(), x)
    # And once the output, which the square's derivative reads.
    assert device_bytes(found) == L * per_layer + X
    assert all("transpose" not in s.op_name for s in found)


def test_activations_are_in_the_temporaries():
    """With rows enough that they outweigh the weights' gradients."""
    x = jax.ShapeDtypeStruct((8 * F, D), jnp.bfloat16)

    def temporaries(policy):
        body = jax.checkpoint(layer, policy=policy)
        compiled, found = saved(lambda w, x: loss(lax.scan(body, x, w)[0]), weights(), x)
        return compiled.memory_analysis().temp_size_in_bytes, device_bytes(found)

    kept, kept_saved = temporaries(POLICIES.save_only_these_names("hidden"))
    none, none_saved = temporaries(POLICIES.nothing_saveable)
    assert kept - none == pytest.approx(kept_saved - none_saved, rel=0.1)


@pytest.mark.parametrize(("inner", "in_segment"), [(False, X + 2 * HIDDEN), (True, X)])
def test_segments_hold_their_inputs_and_one_segment(inner, in_segment):
    body = jax.checkpoint(layer, policy=POLICIES.nothing_saveable) if inner else layer

    def program(w, x):
        segment = jax.checkpoint(
            lambda x, w: lax.scan(body, x, w), policy=POLICIES.nothing_saveable
        )
        w = jax.tree.map(lambda a: a.reshape(3, 3, *a.shape[1:]), w)
        return loss(lax.scan(segment, x, w)[0])

    x = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    _, found = saved(program, weights(9), x)
    assert device_bytes(found) == 3 * X + 3 * in_segment


def test_micro_batches_hold_one_batch_at_a_time():
    body = jax.checkpoint(layer, policy=POLICIES.nothing_saveable)

    def program(w, x):
        part = lambda g, x: (
            jax.tree.map(jnp.add, g, jax.grad(lambda w: loss(lax.scan(body, x, w)[0]))(w)),
            None,
        )
        return lax.scan(part, jax.tree.map(jnp.zeros_like, w), x)[0]

    x = jax.ShapeDtypeStruct((4, B, D), jnp.bfloat16)
    module = hlo.parse(H200.compile(jax.jit(program), weights(), x).as_text())
    assert device_bytes(memory.activations(module, ("x",))) == L * X + X


def test_offloaded_tensors_are_the_hosts():
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    body = jax.checkpoint(layer, policy=policy)
    x = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    _, found = saved(lambda w, x: loss(lax.scan(body, x, w)[0]), weights(), x)
    assert device_bytes(found) == L * X + X
    assert sum(s.shape.bytes for s in found if s.shape.host) == L * HIDDEN


def test_a_device_saves_its_rows():
    mesh = H200X8.mesh({"fsdp": 8})
    x = jax.ShapeDtypeStruct((B, D), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    body = jax.checkpoint(layer, policy=POLICIES.nothing_saveable)
    _, found = saved(
        lambda w, x: loss(lax.scan(body, x, w)[0]),
        weights(sharding=NamedSharding(mesh, P())),
        x,
        of=H200X8,
    )
    assert device_bytes(found) == (L * X + X) // 8


def test_a_gradient_made_on_the_way_forward_is_no_activation():
    """As the chunked cross-entropy does; what it saves has the weight's shape."""

    @jax.custom_vjp
    def total(x, head):
        return jnp.sum((x @ head).astype(jnp.float32))

    def forward(x, head):
        ones = jnp.ones((B, F), jnp.bfloat16)
        return total(x, head), (ones @ head.T, x.T @ ones)

    def backward(residuals, g):
        return jax.tree.map(lambda r: r * g.astype(r.dtype), residuals)

    total.defvjp(forward, backward)
    x = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((D, F), jnp.bfloat16)
    _, found = saved(lambda head, x: total(jnp.sin(x), head), head, x)
    assert device_bytes(found) <= X


def test_state_by_its_shards():
    mesh = H200X8.mesh({"fsdp": 4, "tensor": 2})
    cut = NamedSharding(mesh, P("fsdp", "tensor"))
    tree = {
        "w": jax.ShapeDtypeStruct((24, 6), jnp.float32, sharding=cut),
        "n": jax.ShapeDtypeStruct((7,), jnp.bfloat16, sharding=NamedSharding(mesh, P())),
    }
    assert memory.sharded_bytes(tree) == 6 * 3 * 4 + 7 * 2
    assert memory.sharded_bytes({}) == 0


def test_an_unknown_batch_argument_is_refused():
    x = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    compiled = H200.compile(jax.jit(lambda w, x: x @ w), jax.ShapeDtypeStruct((D, F), x.dtype), x)
    with pytest.raises(ValueError, match="no argument named batch; the program has w, x"):
        memory.activations(hlo.parse(compiled.as_text()))
