"""Tensor-parallel matmuls that multiply one part while the next is under way.

What FLUX (arXiv:2406.06858) fuses tile by tile in one kernel, here at the grain that XLA can
schedule: a matmul is cut in parts, and an optimisation barrier ties each part to the transfer
of the next, so that XLA issues the transfer first and waits for it last.

| form | gather, then multiply | multiply, then reduce |
|---|---|---|
| `plain` | one all-gather, one matmul | one matmul, one reduction |
| `chunked` | 2 parts (`chunked:4`: 4), each gathered under the one before | the same |
| `ring` | blocks go from neighbour to neighbour; a device begins with its own | sums go round |
| `bidirectional` | half of each block goes each way round | the same |

The backward passes overlap by rules of their own; transposing a forward pass would run two
rings into one another. Of gather-matmul, the input is gathered again under the matmul for its
gradient, whose reduction runs under the matmul for the weight's: two whole transfers behind
two whole matmuls, in every form. Of matmul-scatter, the gradient is gathered by the form, and
each part of it feeds two matmuls.

A ring hides all of a gather, since it begins with what is there; n parts keep one part exposed.
It pays where a block's matmul outlasts its transfer: with many columns a device. It loses where
columns are few (each hop has its latency: query, key and value), and in reductions, whose
additions stand between hops. On NVSwitch one direction fills the link, so `bidirectional` wins
only where neighbours are wired to each other, and it overlaps only with XLA's option
`xla_gpu_experimental_parallel_collective_overlap_limit=2`. `choose` weighs this by a cost
model. What could be better: tiles that wait for their own rows (FLUX), which needs a kernel;
results written in place, where each form but `plain` spends one pass over its output.

Legend: n devices of the axis, t rows of each, K contracted, N columns of this device.
"""

from typing import Any

from jax import lax
from jaxtyping import Array, Float

from jaxaccel.overlap import matmul_passes, parts
from jaxaccel.overlap.matmul_cost import choose, modelled_seconds
from jaxaccel.overlap.matmul_passes import PLAIN, Product
from jaxaccel.overlap.parts import FORMS, Form
from pallas_kernels import manual_axes

__all__ = [
    "FORMS",
    "PLAIN",
    "Product",
    "all_gather_matmul",
    "choose",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "modelled_seconds",
]


def all_gather_matmul(
    x: Float[Array, "..."],
    w: Float[Array, "K _"] | tuple[Float[Array, "K _"], ...],
    axis_name: str,
    *,
    form: str,
    dim: int = -2,
    product: Product = PLAIN,
    state: Any = None,
) -> Any:
    """`all_gather(x) @ w`, the gather behind the matmul; inside `jax.shard_map`.

    Kept for the backward pass are x and w, not the gathered x.

    **Exactness**: exact; sums over K are those of one matmul. Gradients: dx is summed over the
    devices in the operands' type, dw in float32.

    Args:
      x: [..., t, K], this device's rows along `dim`.
      w: [K, N], this device's columns; or a tuple of such, which share the gather.
      axis_name: mesh axis to gather over.
      form: of `FORMS`; `chunked:C` has C parts. One device always takes `plain`.
      dim: of x, that the axis cuts; not the last.
      product: how operands are cast and multiplied.
      state: what `product` is given; of a tuple of weights a tuple. Its gradient is what
        `product.next_state` returns.

    Returns:
      [..., n t, N] in the order of the axis; a tuple for a tuple.

    Raises:
      ValueError: shapes or types that do not fit, an unknown form or axis, rows that the parts
        do not divide.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from functools import partial
      >>> from jaxaccel.sharding import make_mesh
      >>> mesh = make_mesh({"tensor": 1}, jax.devices()[:1])
      >>> P = jax.sharding.PartitionSpec
      >>> @partial(jax.shard_map, mesh=mesh, in_specs=(P("tensor"), P(None, "tensor")),
      ...          out_specs=P(None, "tensor"))
      ... def up(x, w):
      ...     return all_gather_matmul(x, w, "tensor", form="ring")
      >>> up(jnp.ones((4, 8)), jnp.ones((8, 16))).shape
      (4, 16)

    References:
      FLUX: arXiv:2406.06858. Decomposed collectives: Wang et al., ASPLOS 2023.
    """
    several = isinstance(w, tuple)
    ws = w if several else (w,)
    states = (state,) * len(ws) if state is None or not several else state
    how = _form("all_gather_matmul", x, ws, axis_name, form, dim)
    _check_parts(how, x, x.shape[how.dim])
    x, *ws = _vary(axis_name, x, *ws)
    out = matmul_passes.gather_matmul((how, how, product), x, tuple(ws), states)
    return out if several else out[0]


def matmul_reduce_scatter(
    x: Float[Array, "..."],
    w: Float[Array, "K _"],
    axis_name: str,
    *,
    form: str,
    backward: str | None = None,
    dim: int = -2,
    product: Product = PLAIN,
    state: Any = None,
) -> Array:
    """`psum_scatter(x @ w)` along `dim`, the sum behind the matmul; inside `jax.shard_map`.

    **Exactness**: exact up to the order of the sum over devices, which is in the operands' type
    (as NCCL's is), rounded at each hop.

    Args:
      x: [..., n t, K], this device's part of the contracted dim.
      w: [K, N], this device's rows.
      axis_name: mesh axis to sum over.
      form: of `FORMS`; `chunked:C` has C parts. One device always takes `plain`.
      backward: form of the backward pass, which gathers; `form` by default.
      dim: of the result, that the axis cuts; not the last.
      product, state: see `all_gather_matmul`.

    Returns:
      [..., t, N], this device's rows of the sum.

    Raises:
      ValueError: as `all_gather_matmul`; rows that the axis does not divide.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from functools import partial
      >>> from jaxaccel.sharding import make_mesh
      >>> mesh = make_mesh({"tensor": 1}, jax.devices()[:1])
      >>> P = jax.sharding.PartitionSpec
      >>> @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "tensor"), P("tensor")),
      ...          out_specs=P("tensor"))
      ... def down(x, w):
      ...     return matmul_reduce_scatter(x, w, "tensor", form="chunked")
      >>> down(jnp.ones((4, 8)), jnp.ones((8, 16))).shape
      (4, 16)

    References:
      FLUX: arXiv:2406.06858, section 3.1.
    """
    forms = form, form if backward is None else backward
    how = [_form("matmul_reduce_scatter", x, (w,), axis_name, each, dim) for each in forms]
    rows, devices = x.shape[how[0].dim], how[0].devices
    if rows % devices:
        raise ValueError(
            f"dim {how[0].dim} of x {x.dtype}{list(x.shape)} must be a multiple of the {devices} "
            f"devices of {axis_name!r}"
        )
    for each in how:
        _check_parts(each, x, rows // devices)
    return matmul_passes.matmul_scatter((*how, product), *_vary(axis_name, x, w), state)


def matmul_all_reduce(
    x: Float[Array, "..."],
    w: Float[Array, "K _"],
    axis_name: str,
    *,
    form: str,
    product: Product = PLAIN,
    state: Any = None,
) -> Array:
    """`psum(x @ w)`, the sum of some columns behind the matmul of the next.

    The column split of DeepSpeed-Domino. The backward pass has no collective here: it stands
    where x was made.

    **Exactness**: exact up to the order of the sum over devices, in the operands' type.

    Args:
      x: [..., K], this device's part of the contracted dim.
      w: [K, N], this device's rows.
      axis_name: mesh axis to sum over.
      form: `plain` or `chunked` (`chunked:C`). A ring would hide only half of the transfer.
      product, state: see `all_gather_matmul`.

    Returns:
      [..., N], the same on all devices of the axis.

    Raises:
      ValueError: as `all_gather_matmul`; a ring; columns that the parts do not divide;
        `shard_map(check_vma=False)`, where the gradient of a sum is another one.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from functools import partial
      >>> from jaxaccel.sharding import make_mesh
      >>> mesh = make_mesh({"tensor": 1}, jax.devices()[:1])
      >>> P = jax.sharding.PartitionSpec
      >>> @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "tensor"), P("tensor")),
      ...          out_specs=P())
      ... def down(x, w):
      ...     return matmul_all_reduce(x, w, "tensor", form="chunked")
      >>> down(jnp.ones((4, 8)), jnp.ones((8, 16))).shape
      (4, 16)

    References:
      Domino: arXiv:2409.15241, section 3.3.
    """
    how = _form("matmul_all_reduce", x, (w,), axis_name, form, -2)
    if how.kind in parts.RINGS:
        raise ValueError(f"form is {form!r}; legal for matmul_all_reduce: plain, chunked")
    if w.shape[1] % how.parts:
        raise ValueError(
            f"w {w.dtype}{list(w.shape)} must have a multiple of {how.parts} columns, the parts "
            f"of {form!r}"
        )
    x, w = _vary(axis_name, x, w)
    if axis_name not in manual_axes.varying(x):
        raise ValueError(
            "matmul_all_reduce is in shard_map(check_vma=False); legal: check_vma=True"
        )
    return matmul_passes.matmul_reduce((how, how, product), x, w, state)


def _form(name: str, x: Array, ws: tuple[Array, ...], axis: str, text: str, dim: int) -> Form:
    kind, count = parts.parse(text)
    try:
        devices = lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"{name} is not in a shard_map over {axis!r}; legal: the name of one of its mesh axes"
        ) from None
    for w in ws:
        if w.ndim != 2 or x.ndim < 2 or x.shape[-1] != w.shape[0] or x.dtype != w.dtype:
            raise ValueError(
                f"{name} got x {x.dtype}{list(x.shape)} and w {w.dtype}{list(w.shape)}; legal: "
                "[..., rows, K] and [K, N] of one type"
            )
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ValueError(f"dim is {dim}; legal for x {list(x.shape)}: any dim but the last")
    kind, count = (kind, count) if devices > 1 else ("plain", 1)
    return Form(kind, count, axis, devices, dim % x.ndim, x.ndim)


def _check_parts(form: Form, x: Array, rows: int) -> None:
    if rows % form.parts:
        raise ValueError(
            f"dim {form.dim} of x {x.dtype}{list(x.shape)}: a device's {rows} rows must be a "
            f"multiple of {form.parts}, the parts of {form.kind!r}"
        )


def _vary(axis: str, first: Array, *others: Array) -> tuple[Array, ...]:
    """Marks all as unlike from device to device, along `axis` too."""
    if axis not in manual_axes.varying(first):
        first = lax.pcast(first, axis, to="varying")
    return manual_axes.vary_alike(first, *others)
