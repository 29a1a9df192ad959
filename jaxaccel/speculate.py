"""Passes of a decoder that verifies what was drafted for it, and the drafts for the next.

A pass of a row with `known` tokens, of which the last is not in the cache yet:

  1. verify   the model reads that token and the drafts after it, G + 1 positions, and draws the
              token that follows each; drafts count as far as they are what was drawn
  2. commit   the n accepted drafts and the token drawn after them are known now; the cache rolls
              back to them, which is setting a length
  3. draft    the heads read the hidden states that the verified pass made, and draft anew

Plain decoding is the same with G = 0. A row is one array of tokens: `known` ones, drafts after
them. Head k reads position i when the tokens up to i + k are known or drafted, so what it wrote
for the last k - 1 positions rests on drafts, and is written again: each pass the heads go over a
window of the last 2 G positions (G + 1, where no head waits for another's draft).

Shape suffixes: B rows, S positions that there is room for, G drafts of a pass, P = G + 1
positions of a pass, T positions of a chunk of the prompt, W positions of the window, D width,
V vocabulary.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxaccel import sampling
from jaxaccel.cache import attend, forward, init_cache, logits, place, room
from jaxaccel.nn import Decoder, Heads
from jaxaccel.sampling import Drawing

NO_TOKEN = -1
ROOM = 256  # the cache is a multiple of it: few shapes to compile for
MAX_DRAFTS = 16  # of a pass; more never pays
RULES = ("match", "rejection")
# Where one head drafts again and again, what stands in the decoder's place is so much of the
# head's own state, and for the rest of the state that it read. Of second drafts a model of the
# README accepted 78 %; with the own state alone 37 %, with the other alone 54 %, with half of each
# 71 % (measured; greedy, held-out prompts).
OWN = 0.6


class Plan(NamedTuple):
    """What a program is compiled for."""

    gamma: int  # drafts of a pass, G
    rule: str  # "match" or "rejection"
    window: int  # W
    burst: int  # passes of a call


def plan(heads: Heads | None, gamma: int, rule: str, burst: int) -> Plan:
    """Checks what is asked of the heads.

    Args:
      heads: of the decoder.
      gamma: drafts of a pass.
      rule: one of `RULES`.
      burst: passes of a call.

    Returns:
      `Plan`.

    Raises:
      ValueError: no such rule, or more drafts than the heads make.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
    if operator.index(gamma) == 0:
        return Plan(0, rule, 1, burst)
    if heads is None:
        raise ValueError(
            f"gamma is {gamma}, and the model has no heads to draft with: train it with "
            "--mtp.depth 1 or more, or decode with gamma 0"
        )
    depth, kind = heads.mtp.depth, heads.mtp.kind
    again = (kind, depth) == ("sequential", 1)
    most = MAX_DRAFTS if again else depth
    if not 0 <= gamma <= most:
        why = "" if again else f": the model has {depth} {kind} head{'s' * (depth > 1)}"
        raise ValueError(f"gamma is {gamma}; legal are 0 to {most}{why}")
    waits = kind == "sequential" and depth > 1
    return Plan(gamma, rule, 2 * gamma if waits else gamma + 1, burst)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Rows that are being written. Any: JAX rebuilds it around leaves that are no arrays."""

    cache: Any  # `Cache` of the model; its lengths are known - 1
    heads: Any  # keys and values of the heads, from `room`; None without drafts
    tokens: Any  # int32 [B, S]: the known ones, then drafts
    known: Any  # int32 [B]
    limit: Any  # int32 [B]: as many are to be known at most
    done: Any  # bool [B]: a stop token came, or the limit
    recent: Any  # [B, W, D]: the model's hidden states of the last positions in the cache
    guesses: Any  # float32 [B, G, V]: what the drafts were drawn from; None with "match"
    passes: Any  # int32: passes in which a row was not done
    drafted: Any  # int32 [G]: drafts that were verified, by place
    accepted: Any  # int32 [G]: those that were accepted


def begin(decoder: Decoder, rows: list[np.ndarray], new: int, plan: Plan, dtype: Any) -> State:
    """The state before anything is read.

    Args:
      decoder: any.
      rows: int32 ids of each prompt.
      new: tokens to make at most, of each row.
      plan: from `plan`.
      dtype: of the cache.

    Returns:
      `State`.
    """
    lengths = np.array([len(ids) for ids in rows], np.int32)
    # Drafts stand past the last token that is kept.
    size = -(-(int(lengths.max()) + new + plan.gamma + 1) // ROOM) * ROOM
    tokens = np.full((len(rows), size), NO_TOKEN, np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    c, heads = decoder.config, decoder.heads
    depth = heads.mtp.depth if heads is not None and plan.gamma else 0
    state = _empty(c, depth, plan, len(rows), size, jnp.dtype(dtype), jnp.dtype(decoder.dtype))
    return dataclasses.replace(
        state,
        tokens=jnp.asarray(tokens),
        known=jnp.asarray(lengths),
        limit=jnp.asarray(lengths + new),
        done=jnp.asarray(np.full(len(rows), new == 0)),
    )


@functools.partial(jax.jit, static_argnums=range(7))
def _empty(config, depth: int, plan: Plan, batch: int, size: int, dtype, compute_dtype) -> State:
    """Zeros; in one program, as making them one by one costs as much as some passes."""
    guesses = plan.gamma and plan.rule == "rejection"
    return State(
        cache=init_cache(config, batch, size, dtype),
        heads=tuple(room(config, depth, batch, size, dtype) for _ in range(2)) if depth else None,
        tokens=None,
        known=None,
        limit=None,
        done=None,
        recent=jnp.zeros((batch, plan.window, config.width), compute_dtype),
        guesses=jnp.zeros((batch, plan.gamma, config.vocab_size)) if guesses else None,
        passes=jnp.int32(0),
        drafted=jnp.zeros(plan.gamma, jnp.int32),
        accepted=jnp.zeros(plan.gamma, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=(0, 3, 4), donate_argnums=2)
def prefill(treedef, leaves, state: State, plan: Plan, size: int) -> State:
    """Reads the next `size` positions of each prompt, all of it but the last token."""
    decoder = jax.tree.unflatten(treedef, leaves)
    start_B = state.cache.lengths
    chunk_BT = _at(state.tokens, start_B, size)
    counts_B = jnp.clip(state.known - 1 - start_B, 0, size)
    hidden_BTD, cache = forward(decoder, jnp.maximum(chunk_BT, 0), state.cache, counts_B)
    state = dataclasses.replace(
        state, cache=cache, recent=_last(state.recent, hidden_BTD, counts_B)
    )
    if (heads := decoder.heads) is None or not plan.gamma:
        return state
    x_BTD, held = hidden_BTD, state.heads
    for k in range(min(heads.mtp.depth, plan.gamma)):
        next_BT = _at(state.tokens, start_B + k + 1, size)
        y_BTD, held = _head(decoder, _nth(heads, k), k, x_BTD, next_BT, held, start_B)
        x_BTD = y_BTD if heads.join else hidden_BTD
    return dataclasses.replace(state, heads=held)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def run(treedef, leaves, state: State, plan: Plan, drawing: Drawing, stop_ids):
    """Up to `plan.burst` passes; the new tokens of each row, how many, and the figures."""
    decoder = jax.tree.unflatten(treedef, leaves)
    end = state.passes + plan.burst

    def one(carry):
        verified = _verify(decoder, carry[0], carry[1], plan, drawing, stop_ids)
        noise_BPV = _noise(verified, decoder, plan, drawing)
        if decoder.heads is None or not plan.gamma:
            return verified, noise_BPV
        return _draft(decoder, decoder.heads, verified, noise_BPV, plan, drawing), noise_BPV

    after, _ = jax.lax.while_loop(
        lambda carry: (carry[0].passes < end) & ~carry[0].done.all(),
        one,
        (state, _noise(state, decoder, plan, drawing)),
    )
    tokens_BN = _at(after.tokens, state.known, plan.burst * (plan.gamma + 1))
    figures = after.passes - state.passes, after.drafted - state.drafted
    figures = *figures, after.accepted - state.accepted
    return after, (tokens_BN, after.known - state.known, after.done, *figures)


def _noise(state: State, decoder: Decoder, plan: Plan, drawing: Drawing) -> Array:
    """Noise of the tokens at known, known + 1, ..: for their drafts, and then for themselves."""
    ahead_1P = jnp.arange(plan.gamma + 1, dtype=jnp.int32)[None]
    return sampling.noise(drawing, *_places(state, ahead_1P), decoder.config.vocab_size)


def _verify(
    decoder: Decoder, state: State, noise_BPV, plan: Plan, drawing: Drawing, stop_ids
) -> State:
    """Verifies the drafts, and commits what is known now."""
    index_1P = jnp.arange(plan.gamma + 1, dtype=jnp.int32)[None]

    # Position known - 1 + j of the row is read, and the token at known + j drawn.
    read_BP = _at(state.tokens, state.known - 1, plan.gamma + 1)
    drafts_BG = read_BP[:, 1:]
    hidden_BPD, cache = forward(decoder, jnp.maximum(read_BP, 0), state.cache)
    logits_BPV = logits(decoder, hidden_BPD)
    if state.guesses is None:
        drawn_BP = sampling.sample(logits_BPV, noise_BPV, drawing)
        accepted_B = sampling.leading(drafts_BG == drawn_BP[:, :-1])
    else:
        drawn_BP, accepted_B = sampling.accept_or_resample(
            jax.nn.softmax(sampling.filtered(logits_BPV, drawing)),
            state.guesses,
            drafts_BG,
            sampling.uniform(sampling.noise_keys(drawing.key, *_places(state, index_1P[:, :-1]))),
            noise_BPV,
        )

    # Up to a stop token and to the limit.
    stops_BP = (drawn_BP[..., None] == stop_ids[None, None]).any(-1)
    stops_BP &= index_1P <= accepted_B[:, None]
    count_B = jnp.minimum(accepted_B + 1, sampling.leading(~stops_BP) + 1)
    count_B = jnp.where(state.done, 0, jnp.minimum(count_B, state.limit - state.known))
    new_BP = index_1P < count_B[:, None]
    known = state.known + count_B
    verified_BG = (drafts_BG >= 0) & ~state.done[:, None]
    accepted_BG = verified_BG & (index_1P[:, 1:] <= accepted_B[:, None])
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, lengths=known - 1),
        tokens=_put(state.tokens, state.known[:, None] + index_1P, drawn_BP, new_BP),
        known=known,
        done=state.done | (stops_BP & new_BP).any(-1) | (known >= state.limit),
        recent=_last(state.recent, hidden_BPD, count_B),
        passes=state.passes + 1,
        drafted=state.drafted + verified_BG.sum(0, dtype=jnp.int32),
        accepted=state.accepted + accepted_BG.sum(0, dtype=jnp.int32),
    )


def _places(state: State, ahead_1N: Array) -> tuple[Array, Array]:
    """[B, N]: the number of each row, and the positions known + `ahead` of it."""
    positions_BN = state.known[:, None] + ahead_1N
    rows_B1 = jnp.arange(len(state.known), dtype=jnp.int32)[:, None]
    return jnp.broadcast_to(rows_B1, positions_BN.shape), positions_BN


def _draft(
    decoder: Decoder, heads: Heads, state: State, noise_BPV, plan: Plan, drawing: Drawing
) -> State:
    """Drafts the tokens at known, known + 1, ... by the heads."""
    start_B = state.known - 1 - plan.window  # of the window, which ends at known - 2
    again = heads.mtp.depth == 1

    def one(carry, head: Heads, k, start_B: Array, ahead):
        """Draft k, from the last of the positions from `start` on; carries those on."""
        x_BTD, tokens, held = carry
        next_BT = _at(tokens, start_B + ahead, x_BTD.shape[1])
        stack = 0 if again else k
        y_BTD, held = _head(decoder, head, stack, x_BTD, next_BT, held, start_B)
        logits_BV, guess_BV = logits(decoder, y_BTD[:, -1]), None
        if plan.rule == "match":  # the noise with which the decoder will draw this token
            noise_BV = jax.lax.dynamic_index_in_dim(noise_BPV, k, axis=1, keepdims=False)
            drafted_B = sampling.sample(logits_BV, noise_BV, drawing)
        else:  # noise of its own: the rule takes drafts to be independent of its draws
            logits_BV = sampling.filtered(logits_BV, drawing)
            rows_B1, positions_B1 = _places(state, jnp.reshape(k, (1, 1)))
            keys_B = sampling.noise_keys(drawing.key, rows_B1[:, 0], positions_B1[:, 0])
            keys_B = jax.vmap(lambda key: jax.random.fold_in(key, 2))(keys_B)
            noisy_BV = logits_BV + sampling.gumbel(keys_B, logits_BV.shape[-1])
            drafted_B = jnp.argmax(noisy_BV, axis=-1).astype(jnp.int32)
            guess_BV = jax.nn.softmax(logits_BV)
        tokens = _put(tokens, (state.known + k)[:, None], drafted_B[:, None], True)
        if again:  # at the next position it stands in the decoder's place
            x_BTD = (1 - OWN) * x_BTD[:, -1:] + OWN * y_BTD[:, -1:]
        elif heads.join:
            x_BTD = y_BTD
        return (x_BTD, tokens, held), guess_BV

    carry = state.recent, state.tokens, state.heads
    drafts = jnp.arange(plan.gamma, dtype=jnp.int32)
    if again:
        # The one head, a position further each time.
        head = _nth(heads, 0)
        carry, first = one(carry, head, jnp.int32(0), start_B, 1)
        step = lambda carry, k: one(carry, head, k, state.known - 2 + k, 1)
        (_, tokens, held), rest = jax.lax.scan(step, carry, drafts[1:])
        join = lambda one, more: jnp.concatenate([one[None], more])
        guesses = jax.tree.map(join, first, rest)
    else:
        used = jax.tree.map(lambda leaf: leaf[: plan.gamma], heads)
        step = lambda carry, xs: one(carry, xs[0], xs[1], start_B, xs[1] + 1)
        (_, tokens, held), guesses = jax.lax.scan(step, carry, (used, drafts))
    guesses = None if guesses is None else jnp.moveaxis(guesses, 0, 1)
    return dataclasses.replace(state, tokens=tokens, heads=held, guesses=guesses)


def _nth(heads: Heads, k: int) -> Heads:
    return jax.tree.map(lambda leaf: leaf[k], heads)


def _head(decoder: Decoder, head: Heads, stack, x_BTD, next_BT, held, start_B):
    """Hidden states of one head at positions from `start_B` on; keys and values with them.

    Its parameters are not stacked; `stack` says where it stands in `held`.
    """
    if head.join is not None:
        x_BTD = head.join(x_BTD, decoder.embed(jnp.maximum(next_BT, 0)))
    at = place(decoder, start_B, x_BTD.shape[1])
    y_BTD, held = attend(head.layer, x_BTD, held, stack, at)
    return head.norm(y_BTD), held


def _at(x_BS: Array, start_B: Array, length: int) -> Array:
    """[B, length]: each row from its start on; NO_TOKEN outside of the row."""
    index = start_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    inside = (index >= 0) & (index < x_BS.shape[1])
    found = jnp.take_along_axis(x_BS, jnp.clip(index, 0, x_BS.shape[1] - 1), axis=1)
    return jnp.where(inside, found, NO_TOKEN)


def _put(x_BS: Array, index_BN: Array, new_BN: Array, where_BN: Any) -> Array:
    """Rows with new values at `index`, as far as `where` says so."""
    rows_B1 = jnp.arange(len(x_BS))[:, None]
    index = jnp.where(where_BN, index_BN, x_BS.shape[1])
    return x_BS.at[rows_B1, index].set(new_BN, mode="drop")


def _last(recent_BWD: Array, new_BTD: Array, count_B: Array) -> Array:
    """The last W of `recent` and the first `count` of `new`."""
    window = recent_BWD.shape[1]
    both = jnp.concatenate([recent_BWD, new_BTD], axis=1)
    index_BW = count_B[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
    return jnp.take_along_axis(both, index_BW[..., None], axis=1)
