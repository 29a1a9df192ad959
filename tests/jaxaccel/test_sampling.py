"""Sampling equals its definition, and the acceptance rule's output the target's distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import sampling
from jaxaccel.sampling import Sampling, drawing


def numpy_top_p(logits, top_p):
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    kept, total = [], 0.0
    for token in np.argsort(-p, kind="stable"):
        if total >= top_p and p[token] < p[kept[-1]]:
            break
        kept.append(token)
        total += p[token]
    return set(kept)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.77, 0.9999])
def test_top_p_equals_numpy(top_p):
    logits = np.array(jax.random.normal(jax.random.key(2), (20, 33))) * 3
    logits[1] = 0.0  # all equally likely
    logits[2, :4] = logits[2].max() + 1  # a tie at the top
    kept = np.asarray(sampling.keep_top_p(jnp.asarray(logits), top_p)) > -np.inf
    for row, expected in zip(kept, logits):
        assert set(np.flatnonzero(row)) == numpy_top_p(expected, top_p)


def test_draws_follow_the_distribution():
    logits = jnp.array([0.0, 2.0, 1.0, -1.0, 1.5])
    rows = 20_000
    how = drawing(Sampling(0.7, top_p=0.9))
    noise = sampling.noise(how, jnp.arange(rows), jnp.full(rows, 7), 5)
    drawn = sampling.sample(jnp.broadcast_to(logits, (rows, 5)), noise, how)
    expected = np.exp(np.asarray(logits, np.float64) / 0.7)
    kept = numpy_top_p(np.asarray(logits) / 0.7, 0.9)
    expected = np.array([x if i in kept else 0.0 for i, x in enumerate(expected)])
    expected /= expected.sum()
    assert 1 < len(kept) < 5
    frequency = np.bincount(np.asarray(drawn), minlength=5) / rows
    np.testing.assert_allclose(frequency, expected, atol=4 * np.sqrt(0.25 / rows))
    assert (frequency[expected == 0] == 0).all()


def test_extreme_temperatures_are_finite():
    logits = jnp.array([[1.0, 3.0, 2.0]] * 50)
    rows, places = jnp.arange(50), jnp.zeros(50, jnp.int32)

    def draw(*how, **more):
        how = drawing(Sampling(*how, **more))
        return sampling.sample(logits, sampling.noise(how, rows, places, 3), how)

    assert set(draw(1e-45, top_p=0.5).tolist()) == {1}
    assert set(draw(1e30).tolist()) == {0, 1, 2}


def test_top_k_keeps_the_largest_and_ties():
    logits = jnp.array([[1.0, 3.0, 2.0, 0.0], [2.0, 2.0, 2.0, 1.0]])
    kept = lambda k: (sampling.keep_top_k(logits, k) > -jnp.inf).sum(-1).tolist()
    assert [kept(k) for k in (0, 1, 2, 4, 9)] == [[4, 4], [1, 3], [2, 3], [4, 4], [4, 4]]


def test_temperature_then_top_k_then_top_p():
    """Top-p is a share of what top-k left, at the temperature: as vLLM does it."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    how = drawing(Sampling(2.0, top_k=3, top_p=0.65))
    warm = np.sqrt(p[:3]) / np.sqrt(p[:3]).sum()  # 0.38, 0.33, 0.27
    assert warm[0] < 0.65 < warm[:2].sum()
    got = jax.nn.softmax(sampling.filtered(jnp.log(jnp.asarray(p, jnp.float32)), how))
    np.testing.assert_allclose(got, [*warm[:2] / warm[:2].sum(), 0, 0], rtol=1e-5)
    greedy = sampling.filtered(jnp.array([1.0, 3.0, 3.0]), drawing(Sampling(0.0)))
    assert greedy.tolist() == [-np.inf, 0.0, -np.inf]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.5}, r"temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, r"top_k is -1"),
        ({"top_p": 0.0}, r"top_p is 0.0"),
        ({"top_p": 1.5}, r"top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_sampling_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


# ---- The acceptance rule, enumerated --------------------------------------------------------

WORDS, DRAFTS = 4, 2
TEXTS = list(itertools.product(range(WORDS), repeat=DRAFTS + 1))


def models(seed, peaked):
    """p and q of the next word after every shorter text; some words are never said."""
    rng = np.random.default_rng(seed)
    after = [text for n in range(DRAFTS + 1) for text in itertools.product(range(WORDS), repeat=n)]
    p, q = ({text: rng.dirichlet(np.ones(WORDS) * 0.7) for text in after} for _ in range(2))
    for text in after[::3]:
        p[text][rng.integers(WORDS)] = 0
        p[text] /= p[text].sum()
    if peaked:  # drafts by argmax: a point mass, whatever the draft's softmax was
        q = {text: np.eye(WORDS)[q[text].argmax()] for text in after}
    return p, q


def emitted(p_PV, q_GV, drafts):
    """{tokens: probability} of the rule, by its own comparisons, over all of its noise."""
    # The rule accepts where u q(x) < p(x): it changes at u = p(x) / q(x) and nowhere else.
    edges = [min(1.0, p_PV[i, x] / q_GV[i, x]) for i, x in enumerate(drafts)]
    cells = [[(0.0, edge, edge / 2), (edge, 1.0, (1 + edge) / 2)] for edge in edges]
    found = {}
    for choice in itertools.product(*cells):
        weight = np.prod([high - low for low, high, _ in choice])
        if weight < 1e-12:
            continue
        # Noise that asks for each word in turn, at every position.
        ask = np.full((WORDS, DRAFTS + 1, WORDS), 0.0)
        ask[np.arange(WORDS), :, np.arange(WORDS)] = 1e6
        tile = lambda x: jnp.asarray(np.broadcast_to(x, (WORDS, *np.shape(x))), jnp.float32)
        tokens, counts = sampling.accept_or_resample(
            tile(p_PV),
            tile(q_GV),
            jnp.asarray(np.broadcast_to(drafts, (WORDS, DRAFTS)), jnp.int32),
            tile([middle for *_, middle in choice]),
            jnp.asarray(ask, jnp.float32),
        )
        n = int(counts[0])
        assert (np.asarray(counts) == n).all()
        last = (
            p_PV[n]
            if n == DRAFTS
            else np.asarray(sampling.residual(*map(jnp.asarray, (p_PV[n], q_GV[n]))))
        )
        for word in range(WORDS):
            if last[word] > 0:  # and then the noise that asks for it gets it
                assert int(tokens[word, n]) == word
            else:
                assert int(tokens[word, n]) != word
            text = (*np.asarray(tokens)[word, :n].tolist(), word)
            found[text] = found.get(text, 0.0) + weight * last[word]
    return found


@pytest.mark.parametrize("peaked", [False, True], ids=["drafts_sampled", "drafts_by_argmax"])
def test_the_acceptance_rule_emits_the_targets_distribution(peaked):
    p, q = models(seed=int(peaked), peaked=peaked)
    total = dict.fromkeys(TEXTS, 0.0)
    with jax.enable_x64():
        for drafts in itertools.product(range(WORDS), repeat=DRAFTS):
            chance = np.prod([q[drafts[:i]][x] for i, x in enumerate(drafts)])
            if not chance:
                continue
            p_PV = np.stack([p[drafts[:i]] for i in range(DRAFTS + 1)])
            q_GV = np.stack([q[drafts[:i]] for i in range(DRAFTS)])
            for text, weight in emitted(p_PV, q_GV, drafts).items():
                # What comes after the emitted tokens is plain decoding.
                for rest in itertools.product(range(WORDS), repeat=DRAFTS + 1 - len(text)):
                    whole, share = (*text, *rest), chance * weight
                    for i in range(len(text), DRAFTS + 1):
                        share *= p[whole[:i]][whole[i]]
                    total[whole] += share
    exact = {t: np.prod([p[t[:i]][x] for i, x in enumerate(t)]) for t in TEXTS}
    distance = sum(abs(total[t] - exact[t]) for t in TEXTS) / 2
    assert distance < 1e-6
    assert sum(exact.values()) == pytest.approx(1)
