"""The order of a sequence in which causal attention is the same work on every device.

Of a sequence in 2n chunks, device i of n holds chunks i and 2n - 1 - i: one that sees little and
one that sees much, together always as much. See `ring_attention.py`.
"""

import numpy as np
from jaxtyping import Array, Shaped


def zigzag(x: Shaped[Array | np.ndarray, "..."], n: int, dim: int = 1) -> Array | np.ndarray:
    """Reorders a whole sequence so that its n contiguous parts are what each device holds.

    Of 2n chunks, part i gets chunk i and chunk 2n - 1 - i. To be done once, on the host, with
    tokens, labels, segments and *positions* alike (RoPE needs the true ones).

    **Exactness**: a permutation.

    Args:
      x: any array of NumPy or JAX, not sharded along `dim`.
      n: devices along the sequence.
      dim: the sequence.

    Returns:
      An array of the same kind and shape.

    Raises:
      ValueError: the length does not divide by 2n.

    Example:
      >>> zigzag(np.arange(8), 2, 0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _chunks(x, n, dim, np.stack([np.arange(n), 2 * n - 1 - np.arange(n)], 1).ravel())


def unzigzag(x: Shaped[Array | np.ndarray, "..."], n: int, dim: int = 1) -> Array | np.ndarray:
    """The inverse of `zigzag`: back to the order of the sequence.

    Args:
      x, n, dim: as of `zigzag`.

    Returns:
      An array of the same kind and shape.

    Raises:
      ValueError: the length does not divide by 2n.

    Example:
      >>> unzigzag(zigzag(np.arange(8), 2, 0), 2, 0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    order = np.r_[np.arange(0, 2 * n, 2), np.arange(2 * n - 1, 0, -2)]
    return _chunks(x, n, dim, order)


def _chunks(x, n: int, dim: int, order: np.ndarray):
    if n < 1 or x.shape[dim] % (2 * n):
        raise ValueError(
            f"dim {dim} of {x.shape} does not divide into two chunks for each of {n} devices; "
            f"legal lengths are multiples of {2 * max(n, 1)}"
        )
    dim %= x.ndim
    cut = x.reshape(*x.shape[:dim], 2 * n, -1, *x.shape[dim + 1 :])
    return cut[(slice(None),) * dim + (order,)].reshape(x.shape)
