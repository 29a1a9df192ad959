"""The plan program: keys, figures that can be calculated by hand, bad input."""

import json
import subprocess
import sys

import pytest

from experiments.configs import load
from experiments.plan import main
from experiments.plan_plot import shares
from jaxaccel.nn import MtpConfig, mtp_shares, parameter_count
from jaxaccel.timeline import Segment

KEYS = (
    "target config peak_gib parameters_gib optimizer_gib gradients_gib activations_gib "
    "temporaries_gib dominant advice matmuls collectives exposed_fraction modelled_step_ms "
    "modelled_mfu flops_per_step recompute_flops_fraction mtp_parameters_share mtp_flops_share "
    "pipeline uncovered"
).split()

pytestmark = pytest.mark.target


def plan(*options: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "experiments.plan", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_json_has_the_keys_and_the_static_sizes():
    # Three rows on a GPU do not halve: what is left to compile as advice is one program.
    status, out, err = plan("tiny", "--target", "h200x2", "--batch", "6", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert list(report) == KEYS
    count = parameter_count(load("tiny").model)
    assert report["target"] == "h200x2"
    # float32, cut in two: 4 bytes a parameter, 8 of Adam's moments.
    assert report["parameters_gib"] == pytest.approx(4 * count / 2 / 2**30, rel=0.01)
    assert report["optimizer_gib"] == pytest.approx(8 * count / 2 / 2**30, rel=0.01)
    assert report["peak_gib"] > report["parameters_gib"] + report["optimizer_gib"]
    # Layers x matmuls x (forward, two backward); XLA merges query, key and value.
    assert report["matmuls"]["bf16"] > 4 * 5 * 3
    assert {c["kind"] for c in report["collectives"]} >= {"all-gather"}
    assert any("compiled peak" in line for line in report["advice"])
    assert report["mtp_parameters_share"] == report["mtp_flops_share"] == 0
    assert "Traceback" not in err


# Of `tiny`: 4 layers, their attention over half of 128 positions, and the output head.
LAYER, ATTENDED, WORDS = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384, 128 * 128, 320 * 128
DECODER = 4 * (LAYER + 2 * 128) + 2 * WORDS + 128


@pytest.mark.parametrize("depth", [1, 2])
def test_heads_in_shares_of_the_decoder(depth):
    """Their layer, its two norms and the last one; sequential ones project two normed vectors."""
    model, sequence = load("tiny").model, load("tiny").sequence
    once = 4 * (LAYER + ATTENDED) + WORDS
    for kind, joined, norms in (("sequential", 2 * 128 * 128, 5 * 128), ("parallel", 0, 3 * 128)):
        parameters, flops = mtp_shares(model, sequence, MtpConfig(depth, kind))
        assert parameters == pytest.approx(depth * (LAYER + joined + norms) / DECODER)
        assert flops == pytest.approx(depth * (LAYER + joined + ATTENDED + WORDS) / once)
    assert mtp_shares(model, sequence, MtpConfig()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--mtp.kind parallel --fp8 delayed --fp8-strict"])
def test_heads_are_told_in_words(options, capsys):
    command = ["tiny", "--mtp.depth", "2", *options.split()]
    with pytest.raises(SystemExit) as done:
        main(command)
    out = capsys.readouterr().out
    assert not done.value.code
    kind = "parallel" if options else "sequential"
    parameters, flops = mtp_shares(load("tiny").model, 128, MtpConfig(2, kind))
    line = f"multi-token prediction: +{parameters:.1%} parameters, +{flops:.1%} model FLOP"
    assert line in out and "advice: " in out and "fp8_lost" not in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--target", "h300"], ["h300", "did you mean h200?"]),
        (["--target", "h200x8", "--mesh", "fsdp=3"], ["fsdp=3", "8 devices"]),
        (["--budget-gib", "0.001"], ["a budget of 0.001 GiB", "fsdp"]),
        (["--plot", "no/such/folder/plan.png"], ["no/such/folder"]),
        (["--plot", "plan.docx"], ["plan.docx", "png", "svg"]),
        (["--remat", "names:nonsense"], ["nonsense", "query", "mlp_gate"]),
        (["--target", "h200x8", "--batch", "4"], ["batch of 4 rows", "multiples of 8"]),
        (["--mtp.depth", "128"], ["--mtp.depth is 128", "at most 127"]),
    ],
)
def test_bad_input_is_one_line(options, expected, capfd):
    """In this process: each start of a program imports JAX."""
    with pytest.raises(SystemExit) as stop:
        main(["tiny", *options])
    out, err = capfd.readouterr()
    assert stop.value.code == 2 and not out
    assert len(err.strip().splitlines()) == 1, err
    for part in expected:
        assert part in err


def test_a_process_of_its_own_writes_nothing_else():
    status, out, err = plan("tiny", "--target", "h300")
    assert status == 2 and not out
    assert len(err.strip().splitlines()) == 1, err
    assert "did you mean h200?" in err


def test_the_timeline_leaves_out_no_transfer_however_short():
    transfers = [Segment("communication", 0.1 * n, 0.001, "", False) for n in range(10)]
    filled = shares(transfers, 1.0, 20)
    assert filled.tolist() == pytest.approx([0.02, 0] * 10, abs=1e-9)
    whole = shares([Segment("compute", 0.0, 0.5, "", False)], 1.0, 7)
    assert whole.tolist() == pytest.approx([1, 1, 1, 0.5, 0, 0, 0])
