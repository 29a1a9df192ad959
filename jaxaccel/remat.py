"""Which tensors of the forward pass are kept for the backward pass, and where.

A policy chooses by the names of `names.py` and not by primitive, so that it sees through
Pallas kernels and custom VJPs. It is a plain `jax.checkpoint` policy; `checkpoint` puts it
around any function, `scan` around every layer of a stack. As text, which is what a command
line takes:

| policy | keeps | repeats |
|---|---|---|
| `none` | all | nothing |
| `attention` | every named tensor | attention's inside, what is cheap and has no name |
| `selective` | matmul outputs, what attention's backward pass needs | norms, activations |
| `full` | each layer's input | the forward pass, save the last matmul of each layer |
| `sqrt` | the input of each of sqrt(L) segments, in `scan` only | nearly two forward passes |
| `sqrt:POLICY` | the same, and POLICY's of one segment | one forward pass, and POLICY's |
| `offload` | each layer's input, in pinned host memory | like `full` |
| `names:key,value@host` | `key`, and `value` in pinned host memory | all else |

Counted in programs compiled for an H200, matmul FLOP beyond `none` and temporaries, which
are what is kept and the work of one layer: `llama-1b3`, 24 layers, batch 4, 4096 tokens,
bfloat16: `none` 31.8 GiB; `attention` 28.3 GiB; `selective` 0 % and 21.1 GiB; `sqrt:none`
25 % and 11.9 GiB; `full` 19 % and 7.6 GiB; `sqrt` 44 % and 8.0 GiB; `offload` 19 % and
7.5 GiB, with 1.5 GiB on the host.

Selective recomputation is arXiv:2205.05198, section 5. It pays on a CPU too: XLA's CPU
back end otherwise spills and recomputes long elementwise chains by its own rules.

`sqrt` is the nested loop of arXiv:1604.06174, section 4.2, in two forms. In `sqrt` each layer
of the segment whose gradient is being taken is a checkpoint of its own, so that 2 sqrt(L)
layer inputs are alive at once, for nearly two more forward passes. In `sqrt:none` the segment
is run again once, for one more forward pass, and keeps all of its tensors. Both copy the
weights of one segment, and the weights' gradients, which can cost more than the inputs they
save: with `a` bytes in a layer's input and `w` in its weights the best segment has
sqrt(L a / (a + 2 w)) layers. So `sqrt` is for stacks that are deep against their width.

`offload` needs a layer to compute for longer than its input travels: long rows, wide layers.

**Exactness**: exact. The same operations run again, on the same inputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jaxaccel import names as vocabulary

Policy = str  # the text of one; see `parse`
Rule = Callable[..., Any]  # a `jax.checkpoint` policy


@dataclasses.dataclass(frozen=True)
class Names:
    """A `jax.checkpoint` policy that keeps what it lists; made by `names`."""

    save: tuple[str, ...]
    offload: tuple[str, ...]

    def __call__(self, primitive, *args, **params):
        """What `jax.checkpoint` asks of every operation."""
        return self._rule(primitive, *args, **params)

    @functools.cached_property
    def _rule(self) -> Rule:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=self.save,
            names_which_can_be_offloaded=self.offload,
            offload_src="device",
            offload_dst="pinned_host",
        )


def names(save: Iterable[str] = (), offload: Iterable[str] = ()) -> Names:
    """A policy that keeps the tensors of these names and repeats all else.

    Args:
      save: names of tensors to keep where they are; those of `names.py`, or any other that
        `jax.ad_checkpoint.checkpoint_name` gave.
      offload: names of tensors to keep in pinned host memory.

    Returns:
      A `jax.checkpoint` policy. `checkpoint` and `scan` refuse it for a function in which
      one of the names is carried by no tensor; `jax.checkpoint` itself would not tell.

    Raises:
      ValueError: a name in both lists, or none in either.

    Example:
      >>> names(save=["key"], offload=["value"])
      Names(save=('key',), offload=('value',))
    """
    if isinstance(save, str) or isinstance(offload, str):
        raise ValueError(f"save and offload are lists of names; got {save!r} and {offload!r}")
    save, offload = tuple(save), tuple(offload)
    if both := sorted(set(save) & set(offload)):
        raise ValueError(f"both saved and offloaded: {', '.join(both)}; a tensor is kept once")
    if not save and not offload:
        raise ValueError("no names to save or offload; that is the policy 'full'")
    return Names(save, offload)


# Rules whose names need not all be there: a model without attention has no key.
POLICIES: dict[str, Rule] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "selective": jax.checkpoint_policies.save_only_these_names(
        *vocabulary.MATMULS, *vocabulary.ATTENTION
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(*vocabulary.ALL),
    # A layer's input is little against what the layer computes with it.
    "offload": names(offload=[vocabulary.LAYER_INPUT]),
}
SQRT = "sqrt"
LEGAL = (*POLICIES, SQRT, f"{SQRT}:POLICY", "names:NAME,NAME@host")


def parse(policy: Policy) -> tuple[Rule, bool]:
    """The rule that a policy's text stands for, and whether it cuts a stack into segments.

    Args:
      policy: `none`, `attention`, `selective`, `full`, `offload`; `names:` and names of
        `names.py`, comma-separated, with `@host` after those to offload; `sqrt`, or `sqrt:`
        and one of the others.

    Returns:
      A `jax.checkpoint` policy for each layer, and True for `sqrt`.

    Raises:
      ValueError: no such policy, or a name that is not in `names.ALL`.

    Example:
      >>> parse("sqrt:names:key,value@host")
      (Names(save=('key',), offload=('value',)), True)
    """
    if policy == SQRT:
        return POLICIES["full"], True
    if policy.startswith(f"{SQRT}:") and not policy.startswith(f"{SQRT}:{SQRT}"):
        return parse(policy.removeprefix(f"{SQRT}:"))[0], True
    if policy.startswith("names:"):
        listed = [name.strip() for name in policy.removeprefix("names:").split(",")]
        bare = [name.removesuffix("@host") for name in listed]
        for name in bare:
            if name not in vocabulary.ALL:
                raise ValueError(
                    f"no tensor is named {name!r} in policy {policy!r}; there are "
                    f"{', '.join(vocabulary.ALL)}"
                )
        host = [name.removesuffix("@host") for name in listed if name.endswith("@host")]
        return names([name for name in listed if not name.endswith("@host")], host), False
    if policy not in POLICIES:
        raise ValueError(f"unknown remat policy {policy!r}; known: {', '.join(LEGAL)}")
    return POLICIES[policy], False


def checkpoint(
    fn: Callable, policy: Policy | Rule = "selective", *, prevent_cse: bool = True
) -> Callable:
    """`fn`, whose backward pass recomputes what `policy` does not keep.

    Args:
      fn: any function of arrays and pytrees.
      policy: a text (see `parse`), or a `jax.checkpoint` policy such as `names` makes. By
        name, so that of an `fn` without names only the inputs are kept.
      prevent_cse: keep the compiler from merging the repeated operations with the first
        ones. False is right inside a `scan`, where it cannot, and faster.

    Returns:
      A function of the same values and gradients; `fn` itself under `none`.

    Raises:
      ValueError: no such policy; `sqrt`, which is for a stack. From the call: a listed name
        is carried by no tensor of `fn`. From the compilation: the policy offloads, and the
        platform compiled for has no host memory beside its own.

    Example:
      >>> float(jax.grad(checkpoint(jax.numpy.sin, "full"))(0.0))
      1.0
    """
    rule, segmented = parse(policy) if isinstance(policy, str) else (policy, False)
    if segmented:
        raise ValueError(f"policy {policy!r} cuts a stack of layers into segments; use remat.scan")
    if rule is POLICIES["none"]:
        return fn
    kept = jax.checkpoint(fn, policy=rule, prevent_cse=prevent_cse)
    if not isinstance(rule, Names):
        return kept

    @functools.wraps(fn)
    def checked(*args, **kwargs):
        _refuse_absent(rule, fn, args, kwargs)
        # On the results: arguments that went through an operation first would no longer be
        # seen as a loop's own, and be stacked up once more.
        out = kept(*args, **kwargs)
        return jax.tree.map(_host_memory_p.bind, out) if rule.offload else out

    return checked


def scan(
    body: Callable,
    carry: Any,
    xs: Any,
    *,
    policy: Policy | Rule = "selective",
    segment: int | None = None,
) -> Any:
    """`jax.lax.scan(body, carry, xs)` under a policy; the loop over a stack of layers.

    With segments of S layers the backward pass holds L / S segment inputs, and what `policy`
    keeps of the S layers of the one segment that it has just run again. Under `full` that is
    S layer inputs, for nearly two more forward passes in all; under `none` all tensors of S
    layers, for one more. S does not have to divide L; where it does not, the last segment is
    shorter, the body is compiled twice and `xs` is copied.

    Args:
      body: `(carry, x) -> (carry, y)`.
      carry: the stream between layers.
      xs: stacked layers, a leading dimension of L on every array.
      policy: what each layer keeps, as for `checkpoint`.
      segment: layers of a segment. None: no segments, or about sqrt(L) with `sqrt`.

    Returns:
      What `jax.lax.scan` returns.

    Raises:
      ValueError: as from `checkpoint`; a segment below 1; unlike leading dimensions.

    Example:
      >>> import jax.numpy as jnp
      >>> scan(lambda c, x: (c * x, None), 2.0, jnp.array([3.0, 4.0]), policy="full")[0].item()
      24.0
    """
    rule, segmented = parse(policy) if isinstance(policy, str) else (policy, False)
    if segment is not None and segment < 1:
        raise ValueError(f"segment is {segment}; it must be at least 1 layer")
    lengths = {jax.numpy.shape(x)[:1] for x in jax.tree.leaves(xs)}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(f"xs must share one leading dimension; theirs are {sorted(lengths)}")
    length = lengths.pop()[0]
    if segment is None and segmented:
        segment = segment_length(length)

    def layers(carry, xs):
        # XLA unrolls a loop of one step, and could then merge what the loop kept apart.
        several = len(jax.tree.leaves(xs)[0]) > 1
        return jax.lax.scan(checkpoint(body, rule, prevent_cse=not several), carry, xs)

    if segment is None:
        return layers(carry, xs)
    whole = length // segment
    parts = []
    if whole:
        fold = lambda x: x[: whole * segment].reshape(whole, segment, *x.shape[1:])
        unfold = lambda y: y.reshape(whole * segment, *y.shape[2:])
        again = checkpoint(layers, "full", prevent_cse=whole == 1)
        carry, ys = jax.lax.scan(again, carry, jax.tree.map(fold, xs))
        parts.append(jax.tree.map(unfold, ys))
    if whole * segment < length or not parts:
        rest = jax.tree.map(lambda x: x[whole * segment :], xs)
        carry, ys = checkpoint(layers, "full")(carry, rest)
        parts.append(ys)
    return carry, jax.tree.map(lambda *y: jax.numpy.concatenate(y), *parts)


def segment_length(length: int) -> int:
    """Layers of a segment such that the fewest layer inputs are alive at once.

    With segments of S layers there are `ceil(L / S) + S`, about 2 sqrt(L). Of equal choices
    one that divides L is taken.

    Args:
      length: layers of the stack, L.

    Returns:
      S, about sqrt(L).

    Example:
      >>> [segment_length(length) for length in (1, 4, 7, 24, 64, 100)]
      [1, 2, 2, 4, 8, 10]
    """
    sizes = range(1, max(length, 1) + 1)
    return min(sizes, key=lambda size: (-(-length // size) + size, length % size > 0, size))


def weights_first(lhs: Array, rhs: Array, *args: Any, **kwargs: Any) -> Array:
    """`jax.lax.dot_general` whose backward pass makes the gradient of rhs before that of lhs.

    Both read the gradient of the result, and only that of rhs, a weight, reads lhs. Made first, it
    lets go of lhs before there is a gradient of lhs. Left to itself XLA may choose the other order:
    `llama-1b3` under `full`, 16 rows of 4096, held five arrays of an MLP's width where four do
    (34.0 and 32.8 GiB, compiled for an H200; the modelled step is the same). Where it does not pay:
    on several devices, whose collectives XLA hides behind what an order forbids.

    **Exactness**: exact; the same operations.

    Args:
      lhs, rhs, *args, **kwargs: as of `jax.lax.dot_general`.

    Returns:
      The product.

    Raises:
      TypeError: as `jax.lax.dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda x, w: weights_first(x, w, (((1,), (0,)), ((), ()))).sum()
      >>> dx, dw = jax.grad(loss, argnums=(0, 1))(jnp.ones((2, 3)), jnp.ones((3, 4)))
      >>> dx[0].tolist(), dw[0].tolist()
      ([4.0, 4.0, 4.0], [2.0, 2.0, 2.0, 2.0])
    """
    dot = lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, *args, **kwargs)
    multiply = jax.custom_vjp(dot)

    def backward(operands, g):
        lhs, rhs = operands
        (d_rhs,) = jax.linear_transpose(lambda rhs: dot(lhs, rhs), rhs)(g)
        g, d_rhs = jax.lax.optimization_barrier((g, d_rhs))
        (d_lhs,) = jax.linear_transpose(lambda lhs: dot(lhs, rhs), lhs)(g)
        return d_lhs, d_rhs

    multiply.defvjp(lambda lhs, rhs: (dot(lhs, rhs), (lhs, rhs)), backward)
    return multiply(lhs, rhs)


def _refuse_absent(rule: Names, fn: Callable, args: tuple, kwargs: dict) -> None:
    """Raises ValueError if `rule` lists a name that no tensor of `fn` carries."""
    found = set()

    def look(primitive, *_, **params):  # a policy sees names inside custom VJPs and loops
        if primitive.name == "name":
            found.add(params["name"])
        return True

    seen = jax.checkpoint(fn, policy=look)
    jax.eval_shape(lambda *args: jax.vjp(lambda *args: seen(*args, **kwargs), *args), *args)
    if absent := sorted({*rule.save, *rule.offload} - found):
        raise ValueError(
            f"no tensor is named {', '.join(absent)}; this function has "
            f"{', '.join(sorted(found)) or 'no named tensor'}"
        )


# The identity, which refuses to be compiled for a platform without host memory spaces. JAX
# drops the transfers there and keeps the tensor where it is, without a word. Only the
# lowering knows which platform the program is for.
_host_memory_p = Primitive("host_memory")
_host_memory_p.def_impl(lambda x: x)
_host_memory_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_host_memory_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_host_memory_p)


def _refuse(ctx, x):
    platforms = ctx.platforms or ctx.module_context.platforms
    raise ValueError(
        f"policy offloads to host memory, and {', '.join(platforms)} has none of its own; "
        "compile for a GPU or TPU, or choose 'full'"
    )


mlir.register_lowering(_host_memory_p, _refuse)
for _platform in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_host_memory_p, lambda ctx, x: [x], platform=_platform)
