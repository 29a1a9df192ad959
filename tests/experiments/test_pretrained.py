"""Training that begins with a released model: where it begins, what it keeps, what is refused."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
from hf_runs import MODEL, call, write_run

from experiments import data, export, hf_config, plan, safetensors, train
from experiments import tokenizer as tokenizer_module
from experiments.config import step_config
from experiments.export import ExportConfig
from experiments.run import load_run
from experiments.runlog import read_metrics
from jaxaccel import optim, sharding
from jaxaccel.nn import MtpConfig
from jaxaccel.train_step import make_train_step

KEPT = {"transformers_version": "4.40.0", "eos_token_id": [257, 9], "pretraining_tp": 1}
FROZEN = ("embedding", "head", "layers.*")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(f"{n} + {i} is {n + i}." for n in range(60)))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A released model's folder, with things in it that are not about weights; and its run."""
    root = tmp_path_factory.mktemp("model")
    run = write_run(root / "run")
    assert call(export, ExportConfig, "--run", run, "--to", root / "model") == 0
    content = json.loads((root / "model/config.json").read_text()) | KEPT
    (root / "model/config.json").write_text(json.dumps(content))
    (root / "model/generation_config.json").write_text('{"eos_token_id": [257, 9]}')
    return root / "model"


def train_here(text, *options):
    """The program's command line, in this process and on one of its devices; its status."""
    # No room for a sample: it would only be compiled.
    args = ["--data.source", text, "--batch", 8, "--sequence", 32, "--log-every", 1, "--remat"]
    args += ["none", "--optimizer.schedule", "constant", "--sample-prompt", 40 * "x", *options]
    with pytest.MonkeyPatch.context() as patch:
        one = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: one)
        patch.setattr(train, "keep_freed_memory", lambda: None)  # it would last
        patch.setattr(train, "plot_losses", lambda _: None)
        with pytest.raises(SystemExit) as exit:
            train.main(["tiny", *map(str, args)])
    return exit.value.code


@pytest.fixture(scope="module")
def tuned(text, model, tmp_path_factory):
    """A run begun with the model and with heads that it lacks: all but a norm and they stay."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    options = ["--run-dir", folder, "--model", model, "--mtp.depth", 1, "--freeze", *FROZEN]
    return folder, options


def weights(folder):
    return {name: x.read() for name, x in safetensors.open_folder(folder).items()}


def test_a_run_begins_with_the_model(text, model, tuned, capsys):
    folder, options = tuned
    assert train_here(text, *options, "--steps", 1) == 0
    out, err = capsys.readouterr()
    assert not err
    found, size = weights(model), sum(x.nbytes for x in weights(model).values())
    assert f"begun with {len(found)} tensors, {size:,} bytes, of {model}; it has no heads" in out
    assert "heads that predict further ahead: they are drawn at random" in out
    # Its first loss is the exported run's on the same batch.
    config, before = load_run(folder).config, load_run(model.parent / "run")
    assert (config.model, config.mtp.depth, config.sequence) == (MODEL, 1, 32)
    assert config.data.tokenizer == str(model / "tokenizer.json")
    corpus = data.load_corpus(config.data, load_run(folder).tokenizer)
    batch = next(data.train_iterator(corpus, batch=8, sequence=32, seed=config.seed))
    plain = dataclasses.replace(step_config(config), mtp=MtpConfig(), freeze=())
    mesh = sharding.make_mesh(sharding.parse_mesh("", 1), jax.devices()[:1])
    made = make_train_step(MODEL, optim.make(config.optimizer, 1), plain, mesh)
    sums = made.evaluate(before.params(), made.place(batch))
    (row,) = read_metrics(folder)
    assert row["loss"] == pytest.approx(float(sums.nll) / int(sums.count), rel=1e-6)
    assert abs(row["loss"] - math.log(MODEL.vocab_size)) > 0.05  # no fresh model's


def test_what_is_exported_again_is_the_model_but_for_what_moved(model, tuned, tmp_path):
    folder, _ = tuned
    assert call(export, ExportConfig, "--run", folder, "--to", tmp_path / "again") == 0
    old, new = weights(model), weights(tmp_path / "again")
    assert {name for name in new if name.startswith("mtp.0.")} == set(new) - set(old)
    assert {n for n, x in old.items() if x.tobytes() != new[n].tobytes()} == {"model.norm.weight"}
    content = json.loads((model / "config.json").read_text())
    heads = {hf_config.HEADS: 1, hf_config.HEADS_KIND: "sequential"}
    assert json.loads((tmp_path / "again/config.json").read_text()) == content | heads
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (model / name).read_bytes()


def test_a_run_goes_on_from_its_checkpoint_without_the_weights(
    text, model, tuned, tmp_path, capsys
):
    folder, options = tuned
    first = jax.tree.map(np.asarray, load_run(folder).params())
    weights_file = (model / "model.safetensors").rename(tmp_path / "away")
    try:
        assert train_here(text, *options, "--steps", 2) == 0
        out, err = capsys.readouterr()
        assert "resumed at step 1" in out and "begun with" not in out and not err
        second = jax.tree.map(np.asarray, load_run(folder).params())
        same = jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), first, second)
        assert all(jax.tree.leaves([same["layers"], same["embedding"], same["head"]]))
        assert not any(jax.tree.leaves([same["final_norm"], same["heads"]["norm"]]))
    finally:
        weights_file.rename(model / "model.safetensors")
    moved = model.rename(tmp_path / "model")
    try:
        assert train_here(text, *options, "--steps", 3) == 2
    finally:
        moved.rename(model)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{model} is no folder of a model" in err


def test_a_run_may_leave_the_heads_of_its_model(tmp_path):
    """And its export then says of none."""
    run = write_run(tmp_path / "run", mtp=MtpConfig(1))
    assert call(export, ExportConfig, "--run", run, "--to", tmp_path / "model") == 0
    assert hf_config.read(tmp_path / "model").mtp.depth == 1
    without = write_run(tmp_path / "without", init_from=str(tmp_path / "model"))
    shutil.copyfile(tmp_path / "model/config.json", without / "origin.json")
    assert call(export, ExportConfig, "--run", without, "--to", tmp_path / "again") == 0
    assert hf_config.read(tmp_path / "again").mtp == MtpConfig()
    assert not any(name.startswith("mtp.") for name in weights(tmp_path / "again"))


# --- what is wrong ----------------------------------------------------------------------


def edit(folder, **changes):
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))


def large_tokenizer(folder):
    documents = [b"red green blue grows falls and stands"]
    tokenizer = tokenizer_module.train_bpe(iter(documents), 270)
    assert tokenizer.get_vocab_size() == 270
    tokenizer.save(str(folder / "tokenizer.json"))


def lose_a_shard(folder):
    names = list(safetensors.open_folder(folder))
    file = (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = dict.fromkeys(names, file.name)
    shards[names[-1]] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


# What to do to the model's folder, what to pass, and what the one line names.
REFUSED = {
    "options of the model": (None, ["--model.layers", "3"], ["--model.* options and --init-from"]),
    "rows": (None, ["--sequence", "41"], ["--sequence is 41", "40 positions", "--sequence 40"]),
    "tokenizer": (large_tokenizer, [], ["has 270 ids", "264"]),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(), [], ["cannot read tokenizer", "model/"]
    ),
    "shard": (lose_a_shard, [], ["model-00002-of-00002.safetensors"]),
    "architecture": (
        lambda folder: edit(folder, architectures=["GPT2LMHeadModel"]),
        [],
        ["GPT2LMHeadModel is not supported", "LlamaForCausalLM", "Gemma2ForCausalLM"],
    ),
    "shape": (
        lambda folder: edit(folder, intermediate_size=25),
        [],
        ["down_proj.weight is [16, 24]; config.json has [16, 25]"],
    ),
    "pattern": (None, ["--freeze", "layers.0.qeury.*"], ["layers.0.qeury.*", "layers.0.query."]),
    "all frozen": (None, ["--freeze", "*"], ["match every parameter"]),
    "dry run": (None, ["--freeze", "no.*", "--dry-run"], ["'no.*' matches no parameter"]),
    "heads": (
        lambda folder: edit(folder, num_nextn_predict_layers=2, mtp_kind="parallel"),
        ["--mtp.depth", "1"],
        ["ask for 1 sequential heads", "has 2 parallel: pass --mtp.depth 2 --mtp.kind parallel"],
    ),
    "a run": (None, ["--model", "{run}"], ["is a run of this program", "experiments.export"]),
    "no folder": (None, ["--model", "/no/such"], ["/no/such is no folder of a model"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(text, model, tmp_path, capsys, case):
    change, options, named = REFUSED[case]
    folder = shutil.copytree(model, tmp_path / "model")
    if change is not None:
        change(folder)
    options = [option.format(run=model.parent / "run") for option in options]
    start = ["--run-dir", tmp_path / "run", "--steps", "1", "--model", folder]
    assert train_here(text, *start, *options) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "Traceback" not in err
    for part in named:
        assert part in err
    assert not (tmp_path / "run").exists()


def test_a_plan_reads_config_json_alone(model, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    found = []
    monkeypatch.setattr(plan, "report", lambda name, config: found.append((name, config)))
    with pytest.raises(SystemExit) as exit:
        plan.main(["tiny", "--model", str(tmp_path), "--target", "h200x8", "--sequence", "40"])
    assert exit.value.code in (0, None)
    ((name, config),) = found
    assert (name, config.model, config.target) == ("tiny", MODEL, "h200x8")
    assert config.data.tokenizer == str(tmp_path / "tokenizer.json")  # not there, and not read
