"""Attention's kernels one configuration at a time, for the table of `pallas_kernels.inspect`.

Legend: B batch, T queries and keys, H query heads, K key/value heads, D head size.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention import mosaic_backward, mosaic_forward
from pallas_kernels.attention.mask import Mask, split, visible
from pallas_kernels.attention.reference import attention_reference
from pallas_kernels.attention.xla import Options

# Kinds of masks for which a kernel has different code: none, a band, two sides and a cap, ids.
VARIANTS = ("full", "causal", "window, cap", "packed")
SOFT_CAP = 30.0
BACKWARD_SIZES = 64, 128, 192  # at 256 dQ and dK spill: see with D=256


def forward_cases(
    B: int = 1, T: int = 8192, H: int = 16, K: int = 4, D: int | None = None
) -> Iterator[tuple]:
    """The forward kernel; without D at all head sizes that have tiles of their own."""
    for size, variant in _configurations(D, sorted(mosaic_forward.TILES)):

        def kernel(q, k, v, variant=variant):
            options, arrays = _options(variant, q)
            return mosaic_forward.forward(options, q, k, v, None, arrays)

        def reference(q, k, v, variant=variant):
            return attention_reference(
                q, k, v, mask=_mask(variant, q), logits_soft_cap=_cap(variant)
            )

        args = [_bf16(B, T, heads, size) for heads in (H, K, K)]
        moved = 2 * B * T * size * 2 * (H + K) + 4 * B * T * H
        flops = 4 * size * B * H * _pairs(variant, T)
        yield f"D={size} {variant}", kernel, reference, args, flops, moved


def backward_cases(
    B: int = 1, T: int = 8192, H: int = 16, K: int = 4, D: int | None = None
) -> Iterator[tuple]:
    """The kernels of the backward pass, given log-sum-exp and delta of the forward pass."""
    if D is not None and D % 64:
        raise ValueError(f"D={D}; the backward kernels take multiples of 64, others are padded")
    for size, variant in _configurations(D, BACKWARD_SIZES):
        chosen = mosaic_backward.choose(
            size, size, soft_cap=_cap(variant) is not None, mask=variant
        )
        for work, tiles in chosen.items():

            def kernel(q, k, v, g, lse, delta, variant=variant, work=work, tiles=tiles):
                options, arrays = _options(variant, q)
                return mosaic_backward.run(work, tiles, options, q, k, v, g, arrays, lse, delta)

            def reference(*args, variant=variant, work=work):
                dq, dk, dv = _gradients(variant, *args)
                return [dk] * work.a + [dv] * work.b if work.keys_stay else [dq]

            args = [_bf16(B, T, heads, size) for heads in (H, K, K, H)]
            args += [jax.ShapeDtypeStruct((B, T, H), jnp.float32)] * 2
            outputs = K * (work.a + work.b) if work.keys_stay else H
            moved = 2 * B * T * size * (2 * H + 2 * K + outputs) + 8 * B * T * H
            # S; dP with the gradient of q or k; and a product for each gradient.
            products = 1 + 2 * work.a + work.b
            flops = 2 * size * products * B * H * _pairs(variant, T)
            name = work.name.removeprefix("attention_")
            yield f"{name} D={size} {variant}", kernel, reference, args, flops, moved


def _configurations(D: int | None, sizes: Sequence[int]) -> Iterator[tuple[int, str]]:
    """All variants of one head size, or of the common ones and the causal one of the others."""
    for size in sizes if D is None else [D]:
        for variant in VARIANTS if D or size <= 128 else ["causal"]:
            yield size, variant


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _cap(variant: str) -> float | None:
    return SOFT_CAP if "cap" in variant else None


def _mask(variant: str, q: Array) -> Mask:
    rows = None
    if variant == "packed":  # four documents
        rows = jnp.arange(q.shape[1], dtype=jnp.int32) * 4 // q.shape[1] + 1
        rows = jnp.broadcast_to(rows, q.shape[:2])
    window = (q.shape[1] // 8, 0) if "window" in variant else None
    return Mask(variant != "full", window, rows, rows)


def _options(variant: str, q: Array) -> tuple:
    band, arrays = split(_mask(variant, q), q.shape[0], q.shape[1], q.shape[1])
    return Options(band, q.shape[3] ** -0.5, _cap(variant)), arrays


def _pairs(variant: str, T: int) -> int:
    """Pairs of a query and a key that the mask allows; a causal mask is half of T x T."""
    if "window" in variant:
        seen = T // 8 + 1
        return seen * (seen + 1) // 2 + (T - seen) * seen
    return {"full": T * T, "causal": T * T // 2, "packed": T * T // 8}[variant]


def _gradients(variant: str, q, k, v, g, lse, delta) -> tuple:
    """What the backward kernels compute, in plain JAX; probabilities in the inputs' dtype."""
    options, arrays = _options(variant, q)
    places = jnp.arange(q.shape[1])
    allowed = visible(options.band, arrays, places, places)[:, None]
    groups = q.shape[2] // k.shape[2]
    k_all, v_all = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    dot = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
    logits, slope = dot("bthd,bshd->bhts", q, k_all) * options.scale, 1.0
    if options.soft_cap is not None:
        slope = 1 - jnp.tanh(logits / options.soft_cap) ** 2
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    lse, delta = (x.swapaxes(1, 2)[..., None] for x in (lse, delta))
    p = jnp.where(allowed, jnp.exp(logits - lse), 0.0)
    ds = p * (dot("bthd,bshd->bhts", g, v_all) - delta) * slope * options.scale
    p, ds = p.astype(q.dtype), ds.astype(q.dtype)
    gather = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3).astype(q.dtype)
    dk = gather(dot("bhts,bthd->bshd", ds, q))
    dv = gather(dot("bhts,bthd->bshd", p, g))
    return dot("bhts,bshd->bthd", ds, k_all).astype(q.dtype), dk, dv
