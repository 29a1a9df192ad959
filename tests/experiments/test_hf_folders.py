"""Folders of models: what they hold, how they come to a mesh, and what is wrong with them."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from experiments import hf, hf_config, safetensors
from experiments.errors import UserError
from experiments.hf_names import parameters
from experiments.safetensors import Shape
from jaxaccel import sharding
from jaxaccel.nn import Decoder, DecoderConfig, MtpConfig
from jaxaccel.train_step import abstract_decoder, parameter_shardings

MODEL = DecoderConfig(
    vocab_size=40, layers=4, width=16, heads=4, kv_heads=2, head_size=8, mlp_width=32
)


def mesh(axes="", count=1):
    return sharding.make_mesh(sharding.parse_mesh(axes, count), jax.devices()[:count])


def random_params(model=MODEL, mtp=MtpConfig()):  # noqa: B008
    shapes = nnx.to_pure_dict(
        nnx.state(jax.eval_shape(lambda: Decoder(model, mtp, rngs=nnx.Rngs(0))))
    )
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), shapes)


def save(folder, model=MODEL, mtp=MtpConfig(), dtype="float32"):  # noqa: B008
    content = hf_config.write(model, 64, dtype)
    if mtp.depth:
        content |= {hf_config.HEADS: mtp.depth, hf_config.HEADS_KIND: mtp.kind}
    params = random_params(model, mtp)
    hf.save(folder, params, hf_config.parse(content), dtype=dtype)
    return params


def rewrite(folder, change):
    """Changes the tensors of a folder, a dict of arrays by name."""
    path = folder / "model.safetensors"
    tensors = {name: stored.read() for name, stored in safetensors.read_header(path).items()}
    change(tensors)
    shapes = {name: Shape(x.dtype, x.shape) for name, x in tensors.items()}
    safetensors.write(path, shapes, tensors.__getitem__, {"format": "pt"})


def load(folder, where=None, dtype=jnp.float32):
    found = hf_config.read(folder)
    return hf.load(hf.find(folder, found.model, found.mtp), where or mesh(), dtype)


# --- to a mesh --------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["data=2,fsdp=2,tensor=2", "stage=2,fsdp=2,tensor=2", "fsdp=8"])
def test_shards_are_those_of_the_training_step(tmp_path, axes):
    params = save(tmp_path / "model")
    found = load(tmp_path / "model", mesh(axes, 8))
    jax.tree.map(np.testing.assert_array_equal, found, params)
    wanted = parameter_shardings(abstract_decoder(MODEL), mesh(axes, 8))
    assert jax.tree.map(lambda x: x.sharding, found) == wanted


def test_each_row_is_read_once_and_no_device_gets_more_than_its_own(tmp_path, monkeypatch):
    save(tmp_path / "model")
    read, counted = safetensors.Stored.read, []
    monkeypatch.setattr(
        safetensors.Stored,
        "read",
        lambda self, rows: counted.append((self.name, rows)) or read(self, rows),
    )
    load(tmp_path / "model", mesh("data=4,tensor=2", 8))
    asked = [
        rows.indices(64)[:2] for name, rows in counted if name.endswith("0.mlp.up_proj.weight")
    ]
    assert sorted(asked) == [(0, 16), (16, 32)]  # [out, in], cut over tensor; data reads no more


def test_narrow_weights(tmp_path):
    params = save(tmp_path / "model", dtype="bfloat16")
    found = load(tmp_path / "model", dtype=jnp.bfloat16)
    assert {x.dtype.name for x in jax.tree.leaves(found["layers"][0]["query"])} == {"bfloat16"}
    assert found["final_norm"]["scale"].dtype == jnp.float32
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "model"), rounded)


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
def test_heads_go_along(tmp_path, kind):
    mtp = MtpConfig(2, kind)
    params = save(tmp_path / "model", mtp=mtp)
    names = safetensors.open_folder(tmp_path / "model")
    assert ("mtp.1.enorm.weight" in names) == (kind == "sequential")
    assert "mtp.1.self_attn.q_proj.weight" in names and "mtp.0.shared_head.norm.weight" in names
    assert hf_config.read(tmp_path / "model").mtp == mtp
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "model"), params)
    without = hf.find(tmp_path / "model", MODEL)  # who wants none gets none
    assert not without.mtp.depth and not any(name.startswith("mtp") for name in without.tensors)


def test_fp8_with_a_scale_a_block_is_multiplied_out(tmp_path):
    model = dataclasses.replace(MODEL, width=192, mlp_width=320)
    save(tmp_path / "model", model)
    random, wanted = np.random.default_rng(1), {}

    def quantise(tensors):
        for name in [name for name in tensors if "proj" in name]:
            x = tensors[name]
            blocks = tuple(-(-n // 128) for n in x.shape)
            scale = random.uniform(0.5, 2.0, blocks).astype(np.float32)
            eight = (x / 4).astype(ml_dtypes.float8_e4m3fn)
            wanted[name] = np.empty_like(x)
            for i in range(x.shape[0]):
                for j in range(x.shape[1]):
                    wanted[name][i, j] = np.float32(eight[i, j]) * scale[i // 128, j // 128]
            tensors[name], tensors[name + "_scale_inv"] = eight, scale

    rewrite(tmp_path / "model", quantise)
    # Cut over two and four devices, at rows that are no border of a block.
    found = load(tmp_path / "model", mesh("fsdp=4,tensor=2", 8))
    for parameter, leaf in zip(parameters(model, MtpConfig()), jax.tree.leaves(found)):
        for i, name in enumerate(parameter.names):
            if name in wanted:
                np.testing.assert_array_equal(np.asarray(leaf[i]).T, wanted[name], err_msg=name)


MEMORY = """
import sys
import jax
from experiments import hf, hf_config
from jaxaccel import sharding
found = hf_config.read(sys.argv[1])
weights = hf.find(sys.argv[1], found.model)
mesh = sharding.make_mesh(sharding.parse_mesh("fsdp=2", 2))
jax.block_until_ready(jax.numpy.zeros(1))
status = lambda: dict(line.split(":") for line in open("/proc/self/status"))
before = int(status()["VmRSS"].split()[0])
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
params = hf.load(weights, mesh)
peak = 1024 * (int(status()["VmHWM"].split()[0]) - before)
print(peak, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks from /proc")
def test_the_host_holds_little_beside_the_shards(tmp_path):
    model = DecoderConfig(
        vocab_size=8000, layers=12, width=1024, heads=16, kv_heads=4, head_size=64, mlp_width=2048
    )
    content = hf_config.write(model, 64, "bfloat16")
    shapes = {
        name: Shape(np.dtype(ml_dtypes.bfloat16), p.stored)
        for p in parameters(model, MtpConfig())
        for name in p.names
    }
    value = lambda name: np.ones(shapes[name].shape, ml_dtypes.bfloat16)
    safetensors.write_folder(tmp_path, shapes, value)
    (tmp_path / "config.json").write_text(json.dumps(content))
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    peak, size = map(int, done.stdout.split())
    assert size > 2**28 and peak > size / 2
    assert peak < 1.3 * size


# --- what is wrong ----------------------------------------------------------------------


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, shape, dtype=np.float32):
    return lambda tensors: tensors.update({name: np.ones(shape, dtype)})


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(Q), f"missing: {Q} .near: model.layers.*q_proj.weight"),
        (put("model.layers.0.self_attn.q_norm.weight", [8]), "unknown: .*q_norm.weight .near: "),
        (put("mtp.0.enorm.weight", [16]), None),  # heads that nobody asked for
        (put("model.layers.0.self_attn.rotary_emb.inv_freq", [4]), None),
        (put(Q, [16, 32]), rf"{Q} is \[16, 32\]; config.json has \[32, 16\]"),
        (put(Q, [32, 16], np.int32), "is int32; legal are float32"),
        (put(Q, [32, 16], ml_dtypes.float8_e4m3fn), f"is float8_e4m3fn; .* {Q}_scale_inv beside"),
        (put(Q + "_scale_inv", [1, 1]), "is float32 with a float32.* scale; scales of blocks go"),
        (put("lm_head.weight", [41, 16]), r"lm_head.weight is \[41, 16\]"),
    ],
)  # fmt: skip
def test_other_tensors_than_those_of_the_model(tmp_path, change, message):
    save(tmp_path / "model")
    rewrite(tmp_path / "model", change)
    if message is None:
        hf.find(tmp_path / "model", MODEL)
        return
    with pytest.raises(UserError, match=message) as error:
        hf.find(tmp_path / "model", MODEL)
    assert "\n" not in str(error.value) and str(tmp_path / "model") in str(error.value)


def test_a_tied_head_that_is_stored_is_the_embedding(tmp_path):
    model = dataclasses.replace(MODEL, tied_head=True)
    params = save(tmp_path / "model", model)
    copy = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]})
    rewrite(tmp_path / "model", copy)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "model"), params)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    rewrite(tmp_path / "model", change)
    with pytest.raises(UserError, match=r"lm_head.weight differs from it: set tie_word_embeddings"):
        hf.find(tmp_path / "model", model)


def test_more_layers_than_tensors_are_refused_before_any_is_made(tmp_path):
    save(tmp_path / "model")
    with pytest.raises(UserError, match=r"has 1,000,000,000 layers, and its files 39 tensors"):
        hf.find(tmp_path / "model", dataclasses.replace(MODEL, layers=10**9))


def test_what_lies_beside_is_left_alone(tmp_path):
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp/thesis.txt").write_text("precious")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    save(tmp_path / "model")
    save(tmp_path / "link")
    assert (tmp_path / "model.tmp/thesis.txt").read_text() == "precious"
    assert (tmp_path / "empty/config.json").exists() and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "empty",
        "link",
        "model",
        "model.tmp",
    ]


def test_blocks_that_do_not_divide(tmp_path):
    save(tmp_path / "model")
    rewrite(tmp_path / "model", put(Q, [32, 16], ml_dtypes.float8_e4m3fn))
    rewrite(tmp_path / "model", put(Q + "_scale_inv", [3, 1]))
    with pytest.raises(UserError, match=r"_scale_inv is \[3, 1\], which are no equal blocks"):
        hf.find(tmp_path / "model", MODEL)


def test_nothing_is_written_over(tmp_path):
    save(tmp_path / "model")
    with pytest.raises(UserError, match="is there already, and not empty"):
        save(tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is there already"):
        save(tmp_path / "file")


def test_what_float16_does_not_hold_is_refused_and_leaves_nothing(tmp_path):
    params = random_params()
    params["final_norm"]["scale"][3] = 1e5
    description = hf_config.parse(hf_config.write(MODEL, 64, "float16"))
    with pytest.raises(UserError, match=r"model.norm.weight holds 1e\+05, and float16 ends at"):
        hf.save(tmp_path / "model", params, description, dtype="float16")
    assert not list(tmp_path.iterdir())
