"""Text out of a decoder, plainly or by speculation, which changes no token.

One pass of the model over several positions costs little more than over one: with few rows,
decoding waits for the weights to be read. So something cheap drafts the next G tokens, one pass
verifies them all, and each draft that is what the model itself would have drawn saves a pass.
Here the heads that the model was trained with (`mtp`) draft.

Tokens are drawn with noise that belongs to their position (`sampling`), and drafts with the same:
so what is drawn does not depend on the drafts, greedy or not, and what differs is rounding alone.
`rule="rejection"` is the classical rule instead. How a pass goes: `speculate`.

Nothing waits for the host between passes: `BURST` of them are one call, with a loop inside, and
a prompt goes through in chunks of 512 positions and, at its end, of 32. That makes three programs
at most, whatever the lengths.

Where it pays: few rows, heads whose drafts are often accepted. Where it does not: batches large
enough for passes to be bound by compute.

Shape suffixes: G drafts of a pass.
"""

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel import sampling as draw
from jaxaccel import speculate
from jaxaccel.cache import Cache, forward, init_cache, logits
from jaxaccel.nn import Decoder
from jaxaccel.sampling import Drawing, Sampling
from jaxaccel.speculate import NO_TOKEN, ROOM, Plan, State

__all__ = [
    "CHUNKS",
    "ROOM",
    "Burst",
    "Cache",
    "Sampling",
    "forward",
    "generate",
    "init_cache",
    "logits",
    "stream",
]

CACHE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)
BURST = 16  # passes of one call
CHUNKS = (512, 32)  # prompt positions that go through at once: as many as still fit, then a few


class Burst(NamedTuple):
    """What a call has made."""

    tokens: list[list[int]]  # new ones of each row, without stop tokens
    passes: int  # of the model, over all rows at once
    drafted: np.ndarray  # int [G]: drafts verified, by place after the last known token
    accepted: np.ndarray  # int [G]


def stream(
    decoder: Decoder,
    prompts: Sequence[Any],  # of sequences of ids; checked below, in words
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    gamma: int = 0,
    rule: str = "match",
    stop: Collection[int] = (),
    cache_dtype: Any = None,
) -> Iterator[Burst]:
    """Continues prompts, a few tokens at a time.

    **Exactness**: with `rule="match"` the tokens do not depend on `gamma`, up to ties of
    rounding: a pass over several positions may round unlike one over a single one. With
    `"rejection"` their distribution does not.

    Args:
      decoder: any; with heads, if `gamma` is above 0.
      prompts: of each row, at least one id below the vocabulary size. Rows may differ in length.
      max_new_tokens: how many to make at most, of each row.
      sampling: how tokens are drawn; row b of any batch of prompts has noise of its own.
      gamma: tokens that the heads draft for each pass: up to their number, or any (up to 16) of
        one sequential head, which then goes on from its own results. 0: plain decoding.
      rule: "match", or "rejection": see `sampling.accept_or_resample`.
      stop: ids that end a row; they are not part of it.
      cache_dtype: of keys and values; None: the decoder's. `float8_e4m3fn` halves 16 bits.

    Returns:
      An iterator of `Burst`s, until every row is done. Its figures are of the burst alone.

    Raises:
      ValueError: an argument is out of its range; at the call, not at the first token.
      TypeError: a whole number is asked for and is none.
    """
    words = decoder.config.vocab_size
    rows = [_checked(ids, words) for ids in prompts]
    if not rows:
        raise ValueError("there is no prompt")
    if operator.index(max_new_tokens) < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if bad := [token for token in stop if not 0 <= operator.index(token) < words]:
        raise ValueError(f"stop holds {bad[0]}; the model knows 0 to {words - 1}")
    plan = speculate.plan(decoder.heads, gamma, rule, BURST)
    dtype = decoder.dtype if cache_dtype is None else cache_dtype
    if dtype not in CACHE_DTYPES:
        legal = ", ".join(jnp.dtype(x).name for x in CACHE_DTYPES)
        raise ValueError(f"cache_dtype is {cache_dtype}; legal are {legal}, and None")
    state = speculate.begin(decoder, rows, max_new_tokens, plan, dtype)
    return _bursts(decoder, state, rows, plan, draw.drawing(sampling), frozenset(stop))


def generate(
    decoder: Decoder, prompt_ids: Sequence[Any] | np.ndarray, **options: Any
) -> Iterator[int]:
    """Continues one prompt, token by token.

    Args:
      decoder: any.
      prompt_ids: at least one id below the vocabulary size.
      **options: as of `stream`.

    Returns:
      An iterator of ids.

    Raises:
      ValueError: as `stream`.

    Example:
      >>> from flax import nnx
      >>> from jaxaccel.nn import DecoderConfig
      >>> config = DecoderConfig(32, layers=2, width=16, heads=2, kv_heads=1, head_size=8,
      ...                        mlp_width=32)
      >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
      >>> len(list(generate(decoder, [1, 2, 3], max_new_tokens=4)))
      4
    """
    bursts = stream(decoder, [prompt_ids], **options)
    return (token for burst in bursts for token in burst.tokens[0])


def _checked(prompt_ids: Any, vocab_size: int) -> np.ndarray:
    ids = np.asarray(prompt_ids)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            f"a prompt is a list of ids, and several are a list of such lists; got {prompt_ids!r}"
        )
    if not len(ids):
        raise ValueError("the prompt is empty; it must hold at least one token")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"the prompt holds token {bad}; the model knows 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def _bursts(decoder, state: State, rows, plan: Plan, drawing: Drawing, stop) -> Iterator[Burst]:
    # Taking a module apart costs more than a small one's step, and casting its weights more than
    # reading them: once, not for every token.
    leaves, treedef = jax.tree.flatten(_cast(decoder))
    stop_ids = jnp.array(sorted(stop) or [NO_TOKEN], jnp.int32)
    if bool(state.done.all()):
        return
    left = max(len(ids) for ids in rows) - 1
    for size in CHUNKS:
        count = -(-left // size) if size == CHUNKS[-1] else left // size
        for _ in range(count):
            state = speculate.prefill(treedef, leaves, state, plan, size)
        left -= count * size
    state, made = speculate.run(treedef, leaves, state, plan, drawing, stop_ids)
    done = False
    while not done:
        # The next is under way before this one is waited for; with all rows done it does nothing.
        state, coming = speculate.run(treedef, leaves, state, plan, drawing, stop_ids)
        tokens, counts, rows_done, passes, drafted, accepted = jax.device_get(made)
        done, made = bool(rows_done.all()), coming
        kept = [row[:count].tolist() for row, count in zip(tokens, counts)]
        kept = [row[:-1] if row and row[-1] in stop else row for row in kept]
        yield Burst(kept, int(passes), drafted, accepted)


def _cast(decoder: Decoder) -> Decoder:
    """The decoder with weights in its compute dtype, to which each use would cast them."""
    if decoder.embedding[...].dtype == decoder.dtype:
        return decoder

    def cast(path, leaf):
        is_scale = jax.tree_util.keystr(path).endswith(".scale.value")  # of a norm: float32
        return leaf if is_scale else leaf.astype(decoder.dtype)

    return jax.tree_util.tree_map_with_path(cast, decoder)
