"""Who computes attention: the Mosaic GPU kernels, cuDNN or XLA.

| lowered for | bfloat16, float16 | float32 |
|---|---|---|
| H100, H200 | Mosaic GPU kernels | XLA |
| another NVIDIA GPU | cuDNN where it serves, else XLA | XLA |
| anything else | XLA | XLA |

`pallas_kernels.dispatch` says how that is known. cuDNN is the exception, since JAX asks it for
its version while tracing: it is chosen where such a GPU is in this process. Programs that XLA
partitions over many devices, and arrays sharded by explicit mesh axes, keep XLA's attention,
which is partitioned with them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import mosaic_backward, mosaic_forward, xla
from pallas_kernels.attention.xla import Options
from pallas_kernels.dispatch import HOPPER, check, choose, unsharded

LARGEST_HEAD = max(mosaic_forward.TILES)


def refuse(implementation: str | None, q: jax.Array, v: jax.Array) -> None:
    """Raises where the kernels were asked for and cannot serve these shapes."""
    check(implementation, _unfit(q, v))


def forward(implementation: str | None, options: Options, q, k, v, sinks, mask) -> tuple:
    """Output and log-sum-exp, as `xla.forward`."""
    return choose(
        implementation,
        partial(mosaic_forward.forward, options),
        partial(xla.forward, options),
        *(q, k, v, sinks, mask),
        unfit=_unfit(q, v),
    )


def backward(
    implementation: str | None, options: Options, q, k, v, sinks, mask, out, lse, dout, dlse
) -> tuple:
    """Gradients of q, k, v and sinks, as `xla.backward`."""
    plain = partial(xla.backward, options)
    operands = q, k, v, sinks, mask, out, lse, dout, dlse
    if max(q.shape[3], v.shape[3]) > mosaic_backward.LARGEST_HEAD:
        return plain(*operands)
    kernel = partial(_mosaic_backward, options)
    return choose(implementation, kernel, plain, *operands, unfit=_unfit(q, v))


def _mosaic_backward(options: Options, q, k, v, sinks, mask, out, lse, dout, dlse):
    empty = lse == -jnp.inf
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1) - dlse
    delta = jnp.where(empty, 0.0, delta)
    dsinks = None
    if sinks is not None:
        p_sink = jnp.exp(sinks.astype(jnp.float32)[None, None] - jnp.where(empty, 0.0, lse))
        dsinks = -(p_sink * delta).sum((0, 1)).astype(sinks.dtype)
    return *mosaic_backward.backward(options, q, k, v, mask, lse, delta, dout), dsinks


def _unfit(q: jax.Array, v: jax.Array) -> str | None:
    """Why the kernels do not serve these inputs, if they do not."""
    if q.dtype == jnp.float32:
        return "has no float32"
    if max(q.shape[3], v.shape[3]) > LARGEST_HEAD:
        return f"has heads of up to {LARGEST_HEAD}, got q {q.shape}, v {v.shape}"
    return unsharded(q, v)


def cudnn_serves(options: Options, q, k, v, sinks, mask, return_lse: bool) -> bool:
    """Whether cuDNN's attention computes just this, on a GPU of this process.

    Left out although cuDNN has it: windows (jax#39576: the whole future is seen if not
    causal), segments, and causal masks of unequal lengths, which it aligns at the top left.
    """
    kinds = _gpus_here()
    if not kinds or any(name in kind for kind in kinds for name in HOPPER):
        return False
    band = options.band
    causal = (band.left, band.right, band.offset) == (None, 0, 0)
    full = band.left is None and band.right is None
    plain = sinks is None and options.soft_cap is None and mask.q_segments is None
    sizes = q.shape[3] == v.shape[3] <= 128 and q.shape[3] % 8 == 0
    return plain and sizes and not return_lse and q.dtype != jnp.float32 and (causal or full)


def cudnn(options: Options, q, k, v) -> jax.Array:
    """The output, by cuDNN on a GPU and by XLA elsewhere."""
    attend = partial(
        jax.nn.dot_product_attention, scale=options.scale, is_causal=options.band.right == 0
    )
    return lax.platform_dependent(
        *(q, k, v),
        cuda=partial(attend, implementation="cudnn"),
        default=partial(attend, implementation="xla"),
    )


def _gpus_here() -> tuple[str, ...]:
    """Kinds of the NVIDIA GPUs that this process has opened."""
    if jax.default_backend() != "gpu":
        return ()
    return tuple({device.device_kind for device in jax.devices()})
