"""Heads that predict further ahead, and their loss: against formulas and loops written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import losses
from jaxaccel.nn import Decoder, DecoderConfig, MtpConfig

CONFIG = DecoderConfig(
    vocab_size=13, layers=2, width=12, heads=2, kv_heads=1, head_size=6, mlp_width=16,
    norm_epsilon=1e-2, rope_theta=100.0,
)  # fmt: skip
KINDS = ("sequential", "parallel")
DEPTH = 2
IGNORED = losses.IGNORED


# --- the loss -----------------------------------------------------------------------------


def reference(logits_NBTV, labels_BT, segments_BT):
    """Nll and count of each prediction, and the gradient by logits: one position at a time."""
    nll, count = np.zeros(len(logits_NBTV)), np.zeros(len(logits_NBTV), int)
    gradient = np.zeros(logits_NBTV.shape)
    for k, b, i in np.ndindex(logits_NBTV.shape[:3]):
        target = labels_BT[b, i + k] if i + k < labels_BT.shape[1] else IGNORED
        between = set(segments_BT[b, i : i + k + 1])
        if target == IGNORED or (k and (len(between) > 1 or 0 in between)):
            continue
        p = np.exp(logits_NBTV[k, b, i] - logits_NBTV[k, b, i].max())
        p /= p.sum()
        nll[k], count[k] = nll[k] - np.log(p[target]), count[k] + 1
        gradient[k, b, i] = p - (np.arange(len(p)) == target)
    return nll, count, gradient


def next_tokens(tokens, segments):
    """Labels: the token after each one, where that lies in its document."""
    later = np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    same = (segments == later) & (segments > 0)
    return np.where(same, np.pad(tokens[:, 1:], ((0, 0), (0, 1))), IGNORED).astype(np.int32)


def batches():
    """Segments and labels, and how many positions each of three predictions counts."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 8))
    documents = np.array([[1, 1, 2, 2, 3, 3, 0, 0]])
    everywhere = np.where(documents > 0, tokens[:1], IGNORED)  # a label also at documents' ends
    two = np.array([[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]])
    prompt = next_tokens(tokens, two)
    prompt[0, :3] = IGNORED  # tokens 1, 2 and 3 are no targets, for no head
    return {
        "documents of two": (documents, next_tokens(tokens[:1], documents), [3, 0, 0]),
        "their ends labelled": (documents, everywhere, [6, 3, 0]),
        "padding": (two, next_tokens(tokens, two), [4 + 2 + 3, 3 + 1 + 2, 2 + 0 + 1]),
        "a masked prompt": (two, prompt, [1 + 2 + 3, 1 + 1 + 2, 1 + 0 + 1]),
        "shorter than the depth": (two[:, :2], np.full((2, 2), 5), [4, 2, 0]),
        "nothing to predict": (np.zeros((1, 4), int), np.full((1, 4), IGNORED), [0, 0, 0]),
    }


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(weights, hidden, head, labels, segments):
    """`LossSums`, and gradients of the objectives' weighted sum by hidden and head."""

    def loss(hidden, head):
        wanted = losses.ahead_labels(labels, segments, len(weights) - 1)
        sums = losses.ahead_cross_entropy(hidden, head, wanted)
        return (sums.objective * jnp.array(weights)).sum(), sums

    (_, sums), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
    return sums, gradients


@pytest.mark.parametrize("name", batches())
def test_the_loss_is_the_reference(name):
    segments, labels, counts = batches()[name]
    random = np.random.default_rng(1)
    hidden = random.normal(size=(3, *labels.shape, CONFIG.width))
    head = random.normal(size=(CONFIG.vocab_size, CONFIG.width))
    nll, count, gradient = reference(hidden @ head.T, labels, segments)
    assert count.tolist() == counts
    weights = (1.0, 0.15, 0.4)
    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    ids = jnp.asarray(labels, jnp.int32), jnp.asarray(segments, jnp.int32)
    sums, gradients = loss_and_gradients(weights, *arrays, *ids)
    assert sums.count.tolist() == counts
    np.testing.assert_allclose(sums.nll, nll, rtol=1e-5)
    gradient *= np.reshape(weights, (3, 1, 1, 1))
    wanted = gradient @ head, np.einsum("nbtv,nbtd->vd", gradient, hidden)
    for got, want in zip(gradients, wanted):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.abs(wanted[1]).max() > 0.1 or not any(counts)


# --- the heads ------------------------------------------------------------------------------


@functools.cache
def decoder(kind):
    """No parameter is 0 or 1, and no two are alike: norms' scales and biases as well."""
    made = Decoder(CONFIG, mtp=MtpConfig(DEPTH, kind), rngs=nnx.Rngs(0))
    random = np.random.default_rng(1)
    move = lambda x: x + jnp.asarray(0.2 * random.standard_normal(x.shape), x.dtype)
    return jax.tree.map(move, made)


ahead = jax.jit(lambda made, tokens, **more: made.ahead(tokens, **more))


def random_tokens(rows, length, seed=3):
    ids = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length))
    return jnp.asarray(ids, jnp.int32)


@jax.jit
def by_hand(made, tokens, segments):
    """Hidden states of `ahead` and their logits; norms and what joins them spelled out."""
    norm = lambda x, part: (
        x / jnp.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_epsilon)
        * part.scale[...][None, None]
    )  # fmt: skip
    rope = made.rope(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    found = [made(tokens, segments_BT=segments)]
    for k in range(1, made.heads.mtp.depth + 1):
        head = jax.tree.map(lambda x, k=k: x[k - 1], made.heads)
        x = found[0]
        if head.join is not None:
            later = made.embedding[...][tokens[:, k:]]
            later = jnp.concatenate([later, jnp.zeros_like(x[:, :k])], axis=1)
            both = norm(later, head.join.embedding_norm), norm(found[-1], head.join.hidden_norm)
            x = jnp.concatenate(both, axis=-1) @ head.join.projection.kernel[...]
        found.append(norm(head.layer(x, rope, segments), head.norm))
    return jnp.stack(found), jnp.stack(found) @ made.head_VD.T


@jax.jit
def gradient(made, tokens, segments, labels):
    """Of the heads' and the decoder's losses, all of weight 1; and their sums."""

    def loss(made):
        hidden = made.ahead(tokens, segments_BT=segments)
        wanted = losses.ahead_labels(labels, segments, made.heads.mtp.depth)
        sums = losses.ahead_cross_entropy(hidden, made.head_VD, wanted)
        return sums.objective.sum(), (sums, hidden)

    return jax.grad(loss, has_aux=True)(made)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_their_losses_are_those_of_a_loop(kind):
    made, tokens = decoder(kind), random_tokens(2, 7)
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
    labels = next_tokens(np.asarray(tokens), np.asarray(segments))
    want, logits = by_hand(made, tokens, segments)
    nll, count, _ = reference(np.asarray(logits, np.float64), labels, np.asarray(segments))
    gradients, (sums, hidden) = gradient(made, tokens, segments, jnp.asarray(labels))
    np.testing.assert_allclose(hidden[0], want[0], rtol=1e-5, atol=1e-6)  # the decoder's call
    np.testing.assert_allclose(hidden, want, rtol=1e-4, atol=1e-5)
    assert np.abs(want[1] - want[2]).max() > 0.5
    assert sums.count.tolist() == count.tolist() == [9, 6, 3]
    np.testing.assert_allclose(sums.nll, nll, rtol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        rows = np.reshape(leaf, (DEPTH if "heads" in jax.tree_util.keystr(path) else 1, -1))
        norms = np.linalg.norm(rows, axis=1)
        assert np.isfinite(norms).all() and norms.min() > 1e-3, jax.tree_util.keystr(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_sees_the_tokens_before_its_target_and_no_others(kind):
    """Row j has another token at j: what changes at position i of head k is seen there."""
    made, length = decoder(kind), 7
    tokens = jnp.broadcast_to(random_tokens(1, length), (length, length))
    changed = (tokens + jnp.eye(length, dtype=jnp.int32)) % CONFIG.vocab_size
    unlike = np.asarray((ahead(made, tokens) != ahead(made, changed)).any(-1))
    j, i = np.indices((length, length))
    for k in range(DEPTH + 1):
        reach = k if kind == "sequential" else 0
        np.testing.assert_array_equal(unlike[k], i + reach >= j)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_those_documents_alone(kind):
    made, row, spans = decoder(kind), np.asarray(random_tokens(1, 10))[0], [(0, 5), (5, 8)]
    tokens, segments, positions = np.zeros((3, 3, 10), np.int32)
    tokens[0] = row  # both documents, then each in a row of its own
    for number, (start, stop) in enumerate(spans, 1):
        here, own = (0, slice(start, stop)), (number, slice(stop - start))
        tokens[own], segments[here], segments[own] = row[start:stop], number, 1
        positions[here] = positions[own] = np.arange(stop - start)
    labels = next_tokens(tokens, segments)
    tokens, segments, positions, labels = map(jnp.asarray, (tokens, segments, positions, labels))
    counted = np.asarray(losses.ahead_labels(labels, segments, DEPTH) != IGNORED)
    assert counted.sum((1, 2)).tolist() == [9 + 3, 4 + 3 + 2, 2 + 1]
    found = np.moveaxis(ahead(made, tokens, segments_BT=segments, positions_BT=positions), 0, 2)
    for number, (start, stop) in enumerate(spans, 1):
        packed, alone = found[0, start:stop], found[number, : stop - start]
        where = counted[number, : stop - start]
        np.testing.assert_array_equal(counted[0, start:stop], where)
        np.testing.assert_allclose(packed[where], alone[where], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trunk_begins_as_without_heads(kind):
    made = Decoder(CONFIG, mtp=MtpConfig(DEPTH, kind), rngs=nnx.Rngs(0))
    parameters = nnx.to_pure_dict(nnx.state(made))
    heads = parameters.pop("heads")
    plain = nnx.to_pure_dict(nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0))))
    jax.tree.map(np.testing.assert_array_equal, parameters, plain)
    assert {x.shape[0] for x in jax.tree.leaves(heads)} == {DEPTH}
    for name in ("gate", "down"):  # heads are drawn apart, from one another and from layers
        kernels = heads["layer"][name]["kernel"], plain["layers"][0][name]["kernel"]
        rows = {x.tobytes() for x in np.concatenate([np.asarray(x) for x in kernels])}
        assert len(rows) == DEPTH + CONFIG.layers
