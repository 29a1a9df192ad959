"""Drawing tokens from logits, with noise that a position keeps however one gets there.

The noise of a token is keyed by (seed, row, position) and by nothing else. Greedy or not, the
token at a position is `argmax(filtered logits + that noise)`, a function of the text before it.
So a decoder that verifies several positions in one pass draws what one that makes them singly
draws: speculation then changes no token, and needs no rule to make up for it.

`accept_or_resample` is that rule all the same (Leviathan et al., Chen et al.), for drafts that
share no noise with the target: the text is another one than plain decoding draws, and its
distribution the same.

Shape suffixes: B rows, G drafts of a row, P positions (G + 1: one more than there are drafts),
V vocabulary.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature, then `top_k`, then `top_p`, then noise.

    Raises:
      ValueError: a value is out of its range.
      TypeError: it is of another kind.

    Example:
      >>> Sampling(temperature=0.7, top_p=0.9)
      Sampling(temperature=0.7, top_k=0, top_p=0.9, seed=0)
    """

    temperature: float = 1.0  # 0 is greedy; below 1 sharpens, above 1 flattens
    top_k: int = 0  # draw from so many likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the likeliest tokens that hold this much probability
    seed: int = 0  # the same seed gives the same tokens

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or positive"
            )
        if operator.index(self.top_k) < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and be at most 1")
        if not 0 <= operator.index(self.seed) < 2**32:
            raise ValueError(f"seed is {self.seed}; it must lie in 0 to 2**32 - 1")


class Drawing(NamedTuple):
    """`Sampling` as arrays, so that other values need no other program."""

    key: Key[Array, ""]
    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]


def drawing(sampling: Sampling) -> Drawing:
    """The arrays of a `Sampling`.

    Args:
      sampling: how to draw.

    Returns:
      `Drawing`.
    """
    s = sampling
    return Drawing(
        jax.random.key(s.seed),
        jnp.float32(s.temperature),
        jnp.int32(min(s.top_k, 2**31 - 1)),
        jnp.float32(s.top_p),
    )


def noise_keys(
    key: Key[Array, ""], rows: Int[Array, "*N"], positions: Int[Array, "*N"]
) -> Key[Array, "*N"]:
    """A key for the token at each (row, position): the same, however one gets there.

    Args:
      key: the seed's, from `jax.random.key`.
      rows: number of the sequence.
      positions: of the token that is drawn, from 0 at the start of the prompt.

    Returns:
      One key each, for `gumbel` and `uniform`.
    """
    fold = jax.random.fold_in
    one = lambda row, position: fold(fold(key, row), position)
    keys = jax.vmap(one)(rows.reshape(-1), positions.reshape(-1))
    return keys.reshape(rows.shape)


def keep_top_k(logits: Float[Array, "*N V"], top_k: int | Int[Array, ""]) -> Float[Array, "*N V"]:
    """Sets to -inf all but the `top_k` largest logits; of equal ones at the edge all stay.

    Args:
      logits: float32.
      top_k: how many to keep; 0, or more than there are, keeps all.

    Returns:
      The logits, some of them -inf.

    Example:
      >>> keep_top_k(jnp.array([1.0, 3.0, 2.0]), 2).tolist()
      [-inf, 3.0, 2.0]
    """
    size = logits.shape[-1]
    count = jnp.where((jnp.int32(top_k) <= 0) | (jnp.int32(top_k) > size), size, jnp.int32(top_k))
    falling = -jnp.sort(-logits, axis=-1)
    least = jax.lax.dynamic_index_in_dim(falling, count - 1, axis=-1)
    return jnp.where(logits >= least, logits, -jnp.inf)


def keep_top_p(logits: Float[Array, "*N V"], top_p: float | Array) -> Float[Array, "*N V"]:
    """Sets to -inf what is not among the likeliest tokens that hold `top_p` of probability.

    A token stays if those likelier than it hold less than `top_p`; so the likeliest stays
    always, and of equally likely ones at the edge all stay.

    Args:
      logits: float32.
      top_p: in (0, 1].

    Returns:
      The logits, some of them -inf.

    Example:
      >>> keep_top_p(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), 0.6) > -jnp.inf
      Array([[ True,  True, False]], dtype=bool)

    References:
      arXiv:1904.09751, section 3.1.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    falling = -jnp.sort(-probabilities, axis=-1)
    likelier = jnp.cumsum(falling, axis=-1) - falling
    least = jnp.min(jnp.where(likelier < top_p, falling, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probabilities >= least, logits, -jnp.inf)


@jax.jit  # or its branches would be compiled anew at every call outside of a program
def filtered(logits: Float[Array, "*N V"], drawing: Drawing) -> Float[Array, "*N V"]:
    """Logits of the distribution that tokens are drawn from.

    Args:
      logits: float32.
      drawing: temperature, `top_k` and `top_p`, applied in this order.

    Returns:
      Logits; at temperature 0 those of the likeliest token alone: 0, and -inf for others.
    """
    size = logits.shape[-1]

    def greedy(logits):
        first = jnp.argmax(logits, axis=-1, keepdims=True)
        word = jax.lax.broadcasted_iota(first.dtype, logits.shape, logits.ndim - 1)
        return jnp.where(word == first, 0.0, -jnp.inf)

    def warm(logits):
        # The largest at 0 and a floor under the temperature: the quotient cannot be NaN.
        logits = logits - logits.max(axis=-1, keepdims=True)
        logits = logits / jnp.maximum(drawing.temperature, 1e-6)
        # Sorting a vocabulary costs more than the rest: only where it changes something.
        few = (drawing.top_k > 0) & (drawing.top_k < size)
        logits = jax.lax.cond(few, lambda x: keep_top_k(x, drawing.top_k), lambda x: x, logits)
        keep = lambda x: keep_top_p(x, drawing.top_p)
        return jax.lax.cond(drawing.top_p < 1, keep, lambda x: x, logits)

    return jax.lax.cond(drawing.temperature > 0, warm, greedy, logits)


def gumbel(keys: Key[Array, "*N"], size: int) -> Float[Array, "*N V"]:
    """Standard Gumbel noise, a row for each key.

    Args:
      keys: from `noise_keys`.
      size: of the vocabulary.

    Returns:
      float32.
    """
    one = lambda key: jax.random.gumbel(key, (size,))
    return jax.vmap(one)(keys.reshape(-1)).reshape(*keys.shape, size)


@functools.partial(jax.jit, static_argnums=3)
def noise(
    drawing: Drawing, rows: Int[Array, "*N"], positions: Int[Array, "*N"], size: int
) -> Float[Array, "*N V"]:
    """What `sample` adds to the logits at each (row, position): `gumbel`, or nothing if greedy.

    Args:
      drawing: how tokens are drawn.
      rows: number of each sequence.
      positions: of the token that is drawn, from 0 at the start of the prompt.
      size: of the vocabulary.

    Returns:
      float32.
    """
    make = lambda: gumbel(noise_keys(drawing.key, rows, positions), size)
    return jax.lax.cond(drawing.temperature > 0, make, lambda: jnp.zeros((*rows.shape, size)))


@jax.jit
def sample(
    logits: Float[Array, "*N V"], noise: Float[Array, "*N V"], drawing: Drawing
) -> Int[Array, "*N"]:
    """Draws tokens: `argmax(filtered(logits) + noise)`.

    Args:
      logits: float32.
      noise: from `noise`; equal noise and logits draw equal tokens.
      drawing: how to draw.

    Returns:
      int32 ids.

    Example:
      >>> how, row = drawing(Sampling(temperature=0.0)), jnp.zeros(1, jnp.int32)
      >>> sample(jnp.array([[1.0, 3.0, 2.0]]), noise(how, row, row, 3), how)
      Array([1], dtype=int32)
    """
    noisy = lambda logits: filtered(logits, drawing) + noise
    logits = jax.lax.cond(drawing.temperature > 0, noisy, lambda logits: logits, logits)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def leading(agree_BG: Bool[Array, "B G"]) -> Int[Array, "B"]:
    """How many values of each row are true before the first that is not.

    Args:
      agree_BG: of any G, 0 included.

    Returns:
      int32, 0 to G.

    Example:
      >>> leading(jnp.array([[True, False, True], [True, True, True]])).tolist()
      [1, 3]
    """
    return jnp.cumprod(agree_BG.astype(jnp.int32), axis=-1).sum(axis=-1, dtype=jnp.int32)


def residual(p: Float[Array, "*N V"], q: Float[Array, "*N V"]) -> Float[Array, "*N V"]:
    """What is drawn from where a draft is refused: max(p - q, 0), normalised.

    Args:
      p: probabilities of the target.
      q: probabilities that the draft was drawn from; zeros: there was none.

    Returns:
      Probabilities; `p` itself where nothing of it exceeds `q`, as then nothing is refused.
    """
    rest = jnp.maximum(p - q, 0.0)
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), p)


def accept_or_resample(
    p_BPV: Float[Array, "B P V"],
    q_BGV: Float[Array, "B G V"],
    drafts_BG: Int[Array, "B G"],
    uniform_BG: Float[Array, "B G"],
    gumbel_BPV: Float[Array, "B P V"],
) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
    """The acceptance rule of speculative sampling; what it emits is distributed as `p`.

    Draft x is accepted with probability min(1, p(x) / q(x)). In place of the first that is not, a
    token is drawn from `residual`; if all are, one more from the last `p`.

    Args:
      p_BPV: the target's probabilities, given the drafts before each position.
      q_BGV: those that each draft was drawn from: of a draft that is the likeliest token, all on
        it and not the softmax; zeros where there is no draft.
      drafts_BG: ids; below 0: there is none, and none is accepted.
      uniform_BG: uniform in [0, 1).
      gumbel_BPV: noise of the token that is drawn at each position.

    Returns:
      Tokens, of which each row's first n + 1 count, and n, the number of accepted drafts.

    References:
      arXiv:2211.17192, section 2.3; arXiv:2302.01318, algorithm 2.
    """
    drafted = drafts_BG.shape[1]
    at = lambda x: jnp.take_along_axis(x, jnp.maximum(drafts_BG, 0)[..., None], axis=-1)[..., 0]
    # Without a division, and strict: what the target never says is never accepted.
    accepted = (uniform_BG * at(q_BGV) < at(p_BPV[:, :drafted])) & (drafts_BG >= 0)
    count_B = leading(accepted)
    rest = jnp.concatenate([residual(p_BPV[:, :drafted], q_BGV), p_BPV[:, drafted:]], axis=1)
    drawn_BP = jnp.argmax(jnp.log(rest) + gumbel_BPV, axis=-1).astype(jnp.int32)
    padded_BP = jnp.pad(drafts_BG, ((0, 0), (0, 1)))
    index = jnp.arange(drafted + 1, dtype=jnp.int32)[None]
    return jnp.where(index < count_B[:, None], padded_BP, drawn_BP), count_B


def uniform(keys: Key[Array, "*N"]) -> Float[Array, "*N"]:
    """A number in [0, 1) for each key, independent of its `gumbel` noise.

    Args:
      keys: from `noise_keys`.

    Returns:
      float32.
    """
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)))(
        keys.reshape(-1)
    ).reshape(keys.shape)
