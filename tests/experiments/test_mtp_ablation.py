"""The ablation of multi-token prediction: agreement, resuming, and the committed figures."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import tokenizer
from experiments.bench import mtp_ablation, parity
from experiments.data import DataConfig
from experiments.errors import UserError
from jaxaccel.nn import Decoder, DecoderConfig, MtpConfig

RESULTS = Path(mtp_ablation.__file__).parents[1] / "results"
TINY = DecoderConfig(320, layers=1, width=16, heads=2, kv_heads=1, head_size=8, mlp_width=16)
SMALL = {"MODEL": TINY, "BATCH": 2, "SEQUENCE": 16, "VALIDATION": 2, "SEEDS": (0,)}


@pytest.fixture(autouse=True)
def quick_random_numbers():
    """Of the other kind, which XLA compiles much faster."""
    with jax.default_prng_impl("rbg"):
        yield


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The bench on a tiny model and a tiny text: two trainings, the cost of one step."""
    source = tmp_path / "source.txt"
    source.write_text("".join(f"line {i} of a small text\n" for i in range(40)))
    trainings = {name: mtp_ablation.TRAININGS[name] for name in ("none", "parallel 2")}
    costed = {"none": mtp_ablation.COSTED["none"]}
    for name, value in {**SMALL, "TRAININGS": trainings, "COSTED": costed}.items():
        monkeypatch.setattr(mtp_ablation, name, value)
    monkeypatch.setattr(mtp_ablation.data, "DataConfig", lambda: DataConfig(source=(str(source),)))


def test_agreement_is_that_of_a_loop_over_positions(monkeypatch):
    monkeypatch.setattr(mtp_ablation, "MODEL", dataclasses.replace(TINY, vocab_size=3))
    mtp = MtpConfig(2, "parallel")
    make = lambda: Decoder(mtp_ablation.MODEL, mtp=mtp, rngs=nnx.Rngs(0))
    decoder = jax.jit(make)()
    tokens = np.random.default_rng(0).integers(3, size=(2, 12), dtype=np.int32)
    segments = np.array([[1] * 5 + [2] * 7, [1] * 3 + [2] * 6 + [0] * 3], np.int32)
    ends = np.diff(segments, append=0) != 0
    labels = np.where(ends | (segments == 0), -1, np.roll(tokens, -1, axis=1))
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    batch = {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}

    places = {"segments_BT": jnp.array(segments), "positions_BT": jnp.array(positions)}
    hidden = jax.jit(lambda: decoder.ahead(jnp.array(tokens), **places))()
    likeliest = np.argmax(hidden @ decoder.head_VD.T, axis=-1)
    expected = []
    for k in (1, 2):
        hits = [
            likeliest[k, row, i] == likeliest[0, row, i + k]
            for row in range(2)
            for i in range(12 - k)
            if segments[row, i] == segments[row, i + k] and labels[row, i + k] >= 0
        ]
        assert len(hits) == {1: 13, 2: 9}[k]
        expected.append(np.mean(hits))
    params = nnx.to_pure_dict(nnx.state(decoder))
    assert mtp_ablation.agreement(mtp, params, [batch, batch]) == pytest.approx(expected)
    assert all(0 < share < 1 for share in expected)


def test_a_training_and_a_cost(small, monkeypatch):
    corpus = mtp_ablation.data.load_corpus(mtp_ablation.data.DataConfig(), tokenizer.load("bytes"))
    setting = parity.Setting(TINY, steps=2, batch=2, sequence=16, validation=2)
    found = mtp_ablation.train("parallel 2", 0, corpus, setting)
    assert len(found["agreement"]) == len(found["mtp_losses"]) == 2
    uniform = np.log(TINY.vocab_size)
    for loss in (found["validation_loss"], found["training_loss"], *found["mtp_losses"]):
        assert loss == pytest.approx(uniform, rel=0.1)  # two steps in
    monkeypatch.setattr(mtp_ablation, "our_step", lambda *sides: sides[2])
    monkeypatch.setattr(mtp_ablation, "alternate", lambda sides, rounds: {"none": [0.1, 0.3]})
    (cost,) = mtp_ablation.costs(2)
    assert cost["times_none"] == 1 and cost["step_ms"] == pytest.approx(200)
    assert cost["matmul_runs"] == cost["matmuls"] > 20  # of one layer: no loop runs twice


def test_what_is_recorded_is_not_done_again(small, tmp_path, capsys, monkeypatch):
    trained = []

    def train(name, seed, corpus, setting):
        trained.append(name)
        losses = {"validation_loss": 2.0 + 0.1 * (name != "none"), "training_loss": 1.5}
        of_heads = {"mtp_losses": [3.0, 4.0], "agreement": [0.5, 0.25]}
        return {**losses, "validation_tokens": 9, **of_heads}

    monkeypatch.setattr(mtp_ablation, "train", train)
    environment = {"command": "the command", "versions": dict.fromkeys(("jax", "jaxlib", "optax"))}
    monkeypatch.setattr(parity.metrics, "environment", lambda: environment)
    cost = {"cost": "none", "environment": environment}
    monkeypatch.setattr(mtp_ablation, "costs", lambda rounds: [cost | {"rounds": rounds}])
    monkeypatch.setattr(mtp_ablation, "cost_table", lambda rows: [])
    record = tmp_path / "record.jsonl"
    options = mtp_ablation.Options(steps=2, record=str(record), json=True)
    mtp_ablation.main(options)
    lines = record.read_text().splitlines()
    assert trained == ["none", "parallel 2"] and len(lines) == 3
    assert capsys.readouterr().out.splitlines() == lines

    # Interrupted after the first training: that one stays, and is what the other is set against.
    record.write_text(lines[0] + "\n")
    mtp_ablation.main(dataclasses.replace(options, json=False))
    assert trained == ["none", "parallel 2", "parallel 2"]
    assert record.read_text().splitlines() == lines
    table = capsys.readouterr().out
    assert "parallel 2: mean gap +5.000 % (+0.1000 nats), of 1 seeds" in table
    assert "worse with every seed; agreement 50.0, 25.0 %" in table
    with pytest.raises(UserError, match="recorded trainings are of steps 2, and here it is 3"):
        mtp_ablation.main(dataclasses.replace(options, steps=3))


def test_the_committed_figures_are_whole():
    text = (RESULTS / "mtp_ablation.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    trained = {(r["training"], r["seed"]): r for r in rows if "training" in r}
    assert list(trained) == [(t, s) for s in mtp_ablation.SEEDS for t in mtp_ablation.TRAININGS]
    for (_, seed), row in trained.items():
        without = trained["none", seed]["validation_loss"]
        gap = 100 * (row["validation_loss"] / without - 1)
        assert row["validation_gap_percent"] == pytest.approx(gap, abs=1e-9)
        assert len(row["agreement"]) == row["mtp"]["depth"] and row["steps"] >= 400
    costs = {r["cost"]: r for r in rows if "cost" in r}
    assert list(costs) == list(mtp_ablation.COSTED)
    for key in ("matmuls", "matmul_runs"):  # parallel heads are one computation
        assert len({costs[f"parallel {depth}"][key] for depth in (1, 2, 4)}) == 1
    assert mtp_ablation.table(rows) + "\n" == (RESULTS / "mtp_ablation.txt").read_text()


def test_bad_input_is_refused(tmp_path):
    (tmp_path / "text").write_text("no JSON\n")
    for options, message in [
        ({"steps": 0}, "--steps is 0; it must be at least 1"),
        ({"record": str(tmp_path / "text")}, "is not a file of JSON lines"),
        ({"record": str(tmp_path / "no" / "file")}, "there is no folder"),
    ]:
        with pytest.raises(UserError, match=message):
            mtp_ablation.main(mtp_ablation.Options(**options))
