"""One step of Adam on moments that are 8-bit codes, in one pass over memory.

XLA decodes both moments, updates them and finds each block's largest element in one pass, and
has to come again to encode by it. The kernel reads the gradient, codes and scales (and the
parameter), keeps a block in registers while its scale is found, and writes the direction (or
the new parameter), codes and scales: 12.06 bytes an element, 16.06 with a float32 parameter.
Moments and parameters that are given up (donated) it overwrites.

Codes and values are turned into each other by arithmetic (`codes`), for Mosaic has no gather;
the noise of the rounding is a hash of a seed and an element's position in its whole array. That
is some 250 instructions an element, in XLA as in the kernel: by the rates of an H200 a few times
what its memory allows (*modelled*; not yet measured). A table in shared memory would be faster.

The kernel (`adam_8bit_mosaic`) and the plain form (`adam_8bit_xla`) are the same functions, on
registers and on arrays.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, manual_axes
from pallas_kernels.adam_8bit_mosaic import Sizes, kernel, unfit
from pallas_kernels.adam_8bit_xla import (
    Coded,
    Decay,
    Mode,
    Scalars,
    bits_of,
    numbers_of,
    plain,
    product,
)

__all__ = ["Coded", "Decay", "Mode", "Scalars", "adam_8bit_update", "adamw_8bit_step", "product"]


def adam_8bit_update(
    g: Float[Array, "*dims"],
    m: Coded,
    v: Coded,
    scalars: Scalars,
    *,
    block: int = 256,
    mode: Mode = "stable",
    implementation: str | None = None,
) -> tuple[Float[Array, "*dims"], Coded, Coded]:
    """One step of Adam for one parameter: the direction, and the moments that follow.

    With m and v decoded (in mode "stable" m is 0 beside a v of 0): `m' = b1 m + (1 - b1) g`,
    `v' = b2 v + (1 - b2) g^2`, direction `(m' / c1) / (sqrt(v' / c2 + eps_root) + eps)`.

    Mode "stable": m's scales carry the sign of their block's extreme, v is rounded at random
    (`codes.encode`, geometric), and never to 0 from above. Mode "bitsandbytes": scales are
    magnitudes, and both moments are rounded to nearest.

    **Exactness**: approximate as the codes are, see `codes`; the direction is of the new
    moments before they are coded. Memory: no moment in float32.

    Args:
      g: gradient, float32 or 16 bits wide.
      m: first moment, codes of map `dynamic`, of the shape of g; scales float32.
      v: second moment, codes of `dynamic_unsigned`.
      scalars: the step's numbers.
      block: elements of a block, a multiple of 32. Blocks lie in the last dimension where they
        divide it, else in the flat array, the last one partial.
      mode: how moments are rounded.
      implementation: "mosaic_gpu", the kernel for Hopper; "xla"; None: the kernel in programs
        for Hopper where blocks come in whole pieces (8 blocks of 256). Asked for, it pads.

    Returns:
      Direction, of the dtype of g; the new moments.

    Raises:
      ValueError: shapes or dtypes do not match, an unknown mode or implementation.
      NotImplementedError: the kernel was asked for and does not serve this.

    Example:
      >>> zero = Coded(jnp.zeros(64, jnp.uint8), jnp.zeros(1))
      >>> step = Scalars(0.9, 0.999, 1e-8, 0.0, 0.1, 0.001, *jnp.zeros(2, jnp.uint32))
      >>> u, m, v = adam_8bit_update(jnp.full(64, -3.0), zero, zero, step, block=64)
      >>> round(float(u[0]), 5), m.codes[0].item(), round(float(m.scale[0]), 5)
      (-1.0, 255, -0.3)
    """
    return _step(implementation, block, mode, None, g, m, v, scalars, None)


def adamw_8bit_step(
    p: Float[Array, "*dims"],
    g: Float[Array, "*dims"],
    m: Coded,
    v: Coded,
    scalars: Scalars,
    decay: Decay,
    *,
    block: int = 256,
    mode: Mode = "stable",
    implementation: str | None = None,
) -> tuple[Float[Array, "*dims"], Coded, Coded]:
    """`adam_8bit_update`, and the new parameter instead of the direction u.

    Mode "stable", as optax: `p - lr (u + decay p)`; "bitsandbytes": `(p - lr u) (1 - lr decay)`.
    For a program that holds its parameters itself; an optax transformation returns directions.

    Args:
      p: parameter, float32 or 16 bits wide.
      g, m, v, scalars: of `adam_8bit_update`.
      decay: learning rate and weight decay.
      block, mode, implementation: of `adam_8bit_update`.

    Returns:
      New parameter, of the dtype of p; the new moments.

    Raises:
      ValueError, NotImplementedError: as `adam_8bit_update`.
    """
    return _step(implementation, block, mode, p, g, m, v, scalars, decay)


def _step(implementation, block, mode, p, g, m, v, scalars, decay):
    _check(block, mode, p, g, m, v)
    missing = unfit(g, block, asked=implementation == "mosaic_gpu", parameter=p)
    dispatch.check(implementation, missing)
    numbers = numbers_of(scalars, decay)
    operands, tree = jax.tree.flatten((p, g, m, v, numbers, bits_of(scalars)))
    operands = jax.tree.unflatten(tree, manual_axes.vary_alike(*operands))
    forms = (partial(form, block, mode) for form in (kernel, plain))
    return dispatch.choose(implementation, *forms, *operands, unfit=missing)


def _check(block, mode, p, g, m, v):
    if mode not in ("stable", "bitsandbytes"):
        raise ValueError(f"mode is {mode!r}; legal are stable and bitsandbytes")
    if block < 32 or block % 32:
        raise ValueError(f"block is {block!r}; legal are positive multiples of 32, say 256")
    inside = g.ndim and g.shape[-1] % block == 0
    scales = (*g.shape[:-1], g.shape[-1] // block) if inside else (-(-g.size // block),)
    for name, coded in (("m", m), ("v", v)):
        if (coded.codes.shape, coded.scale.shape) != (g.shape, scales):
            raise ValueError(
                f"{name} has codes {coded.codes.shape}, scales {coded.scale.shape}; need "
                f"{g.shape}, {scales} with blocks of {block}"
            )
    if p is not None and p.shape != g.shape:
        raise ValueError(f"got a parameter {p.shape}, a gradient {g.shape}; need the same shape")


def cases(N: int = 16384, D: int = 4096, block: int = 256) -> Iterator[tuple]:
    """For the table of `pallas_kernels.inspect`: directions in both modes, and parameters."""
    array = jax.ShapeDtypeStruct
    coded = jax.eval_shape(lambda: Coded(jnp.zeros((N, D), jnp.uint8), jnp.zeros((N, D // block))))
    g, narrow = array((N, D), jnp.float32), array((N, D), jnp.bfloat16)
    bits = array((2,), jnp.uint32)  # an operand, so that XLA does not know the zero in it

    def case(label: str, mode: Mode, p: Any) -> tuple:
        def form(function, p, g, m, v, bits):
            step = Scalars(0.9, 0.999, 1e-8, 0.0, 0.1, 0.001, bits[0], bits[1])
            v = v._replace(scale=jnp.abs(v.scale))  # whatever numbers it is given
            decay = None if p is None else Decay(0.01, 0.1)
            return function(block, mode, p, g, m, v, numbers_of(step, decay), bits)

        forms = (partial(form, function) for function in (kernel, plain))
        sizes = Sizes(N * D // block, block, 4, 0 if p is None else p.dtype.itemsize)
        return label, *forms, [p, g, coded, coded, bits], 0, sizes.traffic().total

    yield case("direction", "stable", None)
    yield case("direction, bitsandbytes", "bitsandbytes", None)
    yield case("parameter", "stable", g)
    yield case("bfloat16 parameter", "stable", narrow)
