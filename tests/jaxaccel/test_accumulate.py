"""Accumulated gradients against those of the large batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import accumulate


def ragged(seed=0, rows=8, length=7):
    """Inputs and a mask that counts from none to all of a row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, length, 3)).astype(np.float32)
    counts = np.array([7, 0, 1, 5, 2, 7, 1, 0])[:rows]
    mask = np.arange(length)[None] < counts[:, None]
    return {"x": jnp.asarray(x), "mask": jnp.asarray(mask)}


def token_losses(weight, part):
    errors = jnp.sin(part["x"] @ weight) ** 2
    return jnp.where(part["mask"], errors, 0.0)


WEIGHT = jnp.array([0.3, -1.1, 0.7])


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_ragged_micro_batches_equal_the_large_batch(count):
    batch = ragged()
    total = batch["mask"].sum().astype(jnp.float32)
    mean = lambda weight, part: token_losses(weight, part).sum() / total
    want = jax.value_and_grad(mean)(WEIGHT, batch)
    gradient = lambda part: jax.value_and_grad(mean)(WEIGHT, part)
    got = jax.jit(lambda b: accumulate.accumulate(gradient, b, count))(batch)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert np.linalg.norm(want[1]) > 0.1


def test_a_mean_of_means_is_not_the_same():
    """The mistake that the sums avoid, and that the test above would see."""
    batch = ragged()

    def mean(weight, part):
        count = jnp.maximum(part["mask"].sum(), 1).astype(jnp.float32)
        return token_losses(weight, part).sum() / count

    want = jax.grad(mean)(WEIGHT, batch)
    wrong = accumulate.accumulate(lambda part: jax.grad(mean)(WEIGHT, part), batch, 4) / 4
    assert np.linalg.norm(wrong - want) > 0.05 * np.linalg.norm(want)


def test_micro_batches_are_strided_so_that_shards_stay_in_place():
    parts = accumulate.split({"a": jnp.arange(12).reshape(6, 2), "b": jnp.arange(6)}, 3)
    assert parts["b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert parts["a"].shape == (3, 2, 2) and parts["a"][1, 1].tolist() == [8, 9]


def test_each_row_is_seen_once():
    seen = accumulate.accumulate(lambda x: jnp.zeros(6, jnp.int32).at[x].add(1), jnp.arange(6), 2)
    assert seen.tolist() == [1] * 6


def test_dtypes_and_structure_are_those_of_fn():
    fn = lambda x: {"n": jnp.int32(len(x)), "s": (x.sum(), x.astype(jnp.bfloat16).sum())}
    one, two = (accumulate.accumulate(fn, jnp.arange(4.0), n) for n in (1, 2))
    assert jax.tree.map(lambda x: x.dtype, one) == jax.tree.map(lambda x: x.dtype, two)
    assert int(two["n"]) == 4


def test_the_program_does_not_grow_with_the_number_of_micro_batches():
    batch = ragged()

    def lines(count):
        fn = lambda part: jax.grad(lambda w: token_losses(w, part).sum())(WEIGHT)
        text = jax.jit(lambda b: accumulate.accumulate(fn, b, count)).lower(batch).as_text()
        return len(text.splitlines())

    assert lines(2) == lines(8)


@pytest.mark.parametrize("count", [0, 3, 16])
def test_a_count_that_does_not_divide_is_refused(count):
    with pytest.raises(ValueError, match=f"a batch of 8 rows does not divide into {count} parts"):
        accumulate.accumulate(lambda part: part["x"].sum(), ragged(), count)
