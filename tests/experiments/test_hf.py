"""Released models, against transformers itself: in, trained, decoded, and out again."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hf_fixtures import FAMILIES, reference_fixture  # noqa: F401

from experiments import hf, hf_config
from experiments.hf_names import parameters
from jaxaccel import decode, optim, sharding
from jaxaccel.cache import logits
from jaxaccel.losses import linear_cross_entropy
from jaxaccel.nn import MtpConfig
from jaxaccel.sampling import Sampling
from jaxaccel.train_step import StepConfig, abstract_decoder, make_train_step

LOSSES = ("llama3", "qwen2", "gemma2")


def mesh(axes="", count=1):
    return sharding.make_mesh(sharding.parse_mesh(axes, count), jax.devices()[:count])


@functools.cache
def loaded(folder):
    description = hf_config.read(folder)
    return description, hf.load(hf.find(folder, description.model), mesh())


def decoder_of(folder):
    description, params = loaded(folder)
    return nnx.merge(nnx.split(abstract_decoder(description.model))[0], params)


def relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(reference, family):
    description, params = loaded(reference.folder(family))
    want, graph = reference.arrays(family), nnx.split(abstract_decoder(description.model))[0]
    tokens = jnp.asarray(want["tokens"])

    def loss(params):
        decoder = nnx.merge(graph, params)
        hidden, cap = decoder(tokens), description.model.logits_soft_cap
        sums = linear_cross_entropy(hidden[:, :-1], decoder.head_VD, tokens[:, 1:], soft_cap=cap)
        return sums.objective / sums.count.astype(jnp.float32), logits(decoder, hidden)

    (value, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert relative(found, want["logits"]) < 1e-5
    np.testing.assert_allclose(value, want["loss"], rtol=1e-6)
    compared = set()
    for parameter, leaf in zip(
        parameters(description.model, MtpConfig()), jax.tree.leaves(gradients)
    ):
        for i, name in enumerate(parameter.names):
            x = np.asarray(leaf[i] if parameter.stacked else leaf)
            expected = want[f"grad/{name}"]
            assert np.abs(expected).max() > 1e-6, f"{name} is near zero"
            assert relative(x.T if parameter.transposed else x, expected) < 5e-5, name
            compared.add(f"grad/{name}")
    assert compared == {key for key in want if key.startswith("grad/")}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_makes_the_same_64_tokens(reference, family):
    want = reference.arrays(family)
    made = decode.generate(
        decoder_of(reference.folder(family)),
        want["tokens"][0, :8],
        max_new_tokens=64,
        sampling=Sampling(0.0),
    )
    assert list(made) == want["greedy"].tolist()


@pytest.mark.parametrize("family", LOSSES)
def test_ten_steps_of_fine_tuning_are_those_of_torch(reference, family):
    want = reference.arrays(family)
    folder = reference.folder(family)
    description = hf_config.read(folder)
    model = description.model
    # Gemma on several devices: what is sharded is read in shards, and trains the same.
    where = mesh("data=2,fsdp=2,tensor=2", 8) if family == "gemma2" else mesh()
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=optim.decays)
    config = StepConfig(clip_norm=math.inf, remat="none")
    with jax.numpy_dtype_promotion("standard"):
        made = make_train_step(model, optimizer, config, where)
        state = made.init(jax.random.key(0), hf.load(hf.find(folder, model), where))
        losses = []
        for tokens in want["train_tokens"]:
            ends = np.full_like(tokens[:, :1], -1)
            batch = {
                "tokens": tokens,
                "labels": np.concatenate([tokens[:, 1:], ends], 1),
                "segments": np.ones_like(tokens),
                "positions": np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape),
            }
            state, figures = made.step(state, made.place(batch))
            losses.append(float(figures.loss))
    assert want["losses"].max() - want["losses"].min() > 0.01
    np.testing.assert_allclose(losses, want["losses"], rtol=1e-5)


def test_the_style_of_released_models_means_the_same(reference):
    for family in FAMILIES:
        older = hf_config.parse(json.loads(reference.version_4(family).read_text()))
        assert older.model == hf_config.read(reference.folder(family)).model, family


def test_what_is_written_is_what_was_read(reference, tmp_path):
    cases = []
    for family in FAMILIES:
        description, params = loaded(reference.folder(family))
        # A config.json made from the decoder alone.
        written = hf_config.parse(hf_config.write(description.model, 99, "float32"))
        hf.save(tmp_path / family, params, written, dtype="float32")
        again = hf_config.read(tmp_path / family)
        assert again.model == description.model
        found = hf.load(hf.find(tmp_path / family, again.model), mesh())
        jax.tree.map(np.testing.assert_array_equal, found, params)
        cases.append((tmp_path / family, reference.arrays(family)["tokens"]))
    for family, (found, notes) in zip(FAMILIES, reference.load(cases), strict=True):
        assert relative(found, reference.arrays(family)["logits"]) < 1e-5, family
        assert not any(notes.values()), (family, notes)
