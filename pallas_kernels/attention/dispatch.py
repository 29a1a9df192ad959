"""Who computes attention: the Mosaic GPU kernels, cuDNN or XLA.

| lowered for | bfloat16, float16 | float32 |
|---|---|---|
| H100, H200 | Mosaic GPU kernels | XLA |
| another NVIDIA GPU | cuDNN where it serves, else XLA | XLA |
| anything else | XLA | XLA |

The choice is made while the program is lowered, by the device it is lowered for: that may be
one that is not here. cuDNN is the exception, since JAX asks it for its version while tracing:
it is chosen where such a GPU is in this process. Programs that XLA partitions over many
devices, and arrays sharded by explicit mesh axes, keep XLA's attention, which is partitioned
with them; under `jax.shard_map` over all mesh axes each device runs the kernels.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.attention import mosaic_backward, mosaic_forward, xla
from pallas_kernels.attention.xla import Options

HOPPER = ("H100", "H200", "GH200")
LARGEST_HEAD = max(mosaic_forward.TILES)
_NEEDS = f"implementation='mosaic_gpu' needs a Hopper GPU ({', '.join(HOPPER)})"


def refuse(implementation: str | None, q: jax.Array, v: jax.Array) -> None:
    """Raises NotImplementedError if the kernels were asked for and cannot serve these shapes."""
    if implementation == "mosaic_gpu" and (reason := _unfit(q, v)):
        raise NotImplementedError(f"implementation='mosaic_gpu' {reason}; None or 'xla' works")


def forward(implementation: str | None, options: Options, q, k, v, sinks, mask) -> tuple:
    """Output and log-sum-exp, as `xla.forward`."""
    return _choose(
        implementation,
        _unfit(q, v) is None,
        partial(mosaic_forward.forward, options),
        partial(xla.forward, options),
        *(q, k, v, sinks, mask),
    )


def backward(
    implementation: str | None, options: Options, q, k, v, sinks, mask, out, lse, dout, dlse
) -> tuple:
    """Gradients of q, k, v and sinks, as `xla.backward`."""
    return _choose(
        implementation,
        _unfit(q, v) is None and max(q.shape[3], v.shape[3]) <= mosaic_backward.LARGEST_HEAD,
        partial(_mosaic_backward, options),
        partial(xla.backward, options),
        *(q, k, v, sinks, mask, out, lse, dout, dlse),
    )


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
    if any(axes is not None for x in (q, v) for axes in jax.typeof(x).sharding.spec):
        return "takes no array sharded by explicit mesh axes; wrap it in jax.shard_map"
    return None


def _choose(implementation, fit: bool, kernel, plain, *operands):
    if implementation == "xla" or not fit:
        return plain(*operands)
    kernel = partial(_varying_as, plain, kernel)
    if backend.interpreting():
        return (kernel if implementation == "mosaic_gpu" else plain)(*operands)
    required = _NEEDS if implementation == "mosaic_gpu" else None

    def choose(*operands):
        hopper = backend.on_device(HOPPER, required=required)
        return lax.cond(hopper, kernel, plain, *operands)

    def elsewhere(*operands):
        if required:  # raises, while lowering
            hopper = backend.on_device(HOPPER, required=required)
            return lax.cond(hopper, plain, plain, *operands)
        return plain(*operands)

    return lax.platform_dependent(*operands, cuda=choose, default=elsewhere)


def _varying_as(plain, kernel, *operands):
    """Calls the kernel; under `shard_map` its results vary over the axes that XLA's do."""

    def match(x, like):
        axes = _varying(like) - _varying(x)
        return lax.pcast(x, tuple(axes), to="varying") if axes else x

    return jax.tree.map(match, kernel(*operands), jax.eval_shape(plain, *operands))


def _varying(x) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


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
