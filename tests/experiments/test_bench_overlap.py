"""The comparison of overlapped steps: one group compiled, its arithmetic, the committed figures."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.bench import overlap as bench
from experiments.bench import overlap_matmuls, overlap_plot
from experiments.errors import UserError
from jaxaccel import overlap, target
from jaxaccel.cost import CostModel
from jaxaccel.timeline import Segment, Timeline

RESULTS = Path(bench.__file__).parents[1] / "results"
X2 = target.parse("h200x2")


def row(side: str, ms: float, **changes) -> dict:
    found = {
        "config": "tiny", "target": "h200x2", "mesh": "tensor=2", "layers": 4, "width": 128,
        "batch": 2, "sequence": 1024, "micro_batches": 1, "remat": "full", "precision": "bfloat16",
        "side": side, "modelled_step_ms": ms, "modelled_exposed_fraction": 0.25,
        "modelled_sent_ms": 3.0, "compiled_windows_with_matmul": 6.0, "compiled_windows": 8.0,
        "compiled_collectives": {"all-gather": {"count": 8.0, "bytes": 2.0**30}},
        "compiled_peak_gib": 1.5,
    }  # fmt: skip
    return found | changes


def test_table_says_what_is_compiled_and_what_modelled():
    refused = row("domino", 0.0, refused="no halves")
    parts = row("none", 16.0, micro_batches=2)
    lines = bench.table([row("none", 8.0), row("sequence", 6.0), refused, parts]).splitlines()
    title, kinds, heads, plain, faster, no, _, second, *_, last = lines
    assert title == (
        "tiny (4 layers, width 128) on h200x2, tensor=2: 2 x 1,024 tokens, remat full, bfloat16"
    )
    assert kinds.index("modelled") < heads.index("sent, ms") < kinds.index("compiled")
    assert kinds.index("compiled") < heads.index("peak, GiB")
    assert plain.split() == "none 8.0 1.000 25.0 % 3.0 6 / 8 1.00 1.50".split()
    assert faster.split()[:3] == ["sequence", "6.0", "0.750"]
    assert no.endswith("refused: no halves")
    assert "in 2 micro-batches" in second and last.split()[2] == "1.000"


def test_a_layer_goes_from_its_attention_to_the_next_ones():
    names = ["attention_forward"] * 6 + ["transpose(x)/attention_dq"] * 3 + ["transpose(x)/other"]
    segments = tuple(Segment("compute", float(i), 1.0, n, False) for i, n in enumerate(names))
    played = Timeline(10.0, (), segments, 0.0)
    assert overlap_plot.layer(played, 3, "forward") == (0.0, 2.0)  # two calls in each
    assert overlap_plot.layer(played, 3, "backward") == (6.0, 7.0)
    assert overlap_plot.layer(played, 8, "backward") == (0.0, 10.0)  # no layer is told apart


@pytest.mark.target
def test_one_group_compiled_with_its_picture(tmp_path):
    preset = bench.load("tiny")
    model = dataclasses.replace(preset.model, layers=2)
    preset = dataclasses.replace(preset, model=model, attention="xla")
    group = bench.Group("tensor", "tensor=2", 2, ("sequence", "buckets"))
    plain, sequence, refused = bench.rows("tiny", preset, X2, group, tmp_path)
    assert [r["overlap"] for r in (plain, sequence, refused)] == ["none", "sequence", "buckets"]
    assert "'buckets' hides what travels along data" in refused["refused"]
    # Activations, bfloat16 [2, 128, 128], are summed twice a layer and pass, and after the lookup
    # and before the head, whose sums are float32; cut along the sequence, they are gathered.
    (sums,) = plain["compiled_collectives"].values()
    assert 8 + 1 + 2 <= sums["bytes"] / (2 * 2 * 128 * 128) < 12
    counts = {kind: each["count"] for kind, each in sequence["compiled_collectives"].items()}
    assert counts["reduce-scatter"] >= 2 * 2 * 2 <= counts["all-gather"]
    assert sum(counts.values()) == sequence["compiled_windows"]
    assert 0 < sequence["modelled_exposed_fraction"] < 1
    assert sequence["compiled_peak_gib"] < plain["compiled_peak_gib"] < 0.1
    assert [f.name for f in tmp_path.iterdir()] == ["overlap_tiny_tensor_sequence.png"]
    json.dumps([plain, sequence, refused])


@pytest.mark.target
def test_matmuls_of_a_layer():
    shapes = overlap_matmuls.shapes(bench.load("llama-8b").model, 8)
    assert shapes["gate, up", "all_gather_matmul"] == (4096, 3584)
    assert shapes["query, key, value", "all_gather_matmul"] == (4096, 768)
    assert shapes["down", "matmul_reduce_scatter"] == (1792, 4096)
    assert shapes["attention output", "matmul_all_reduce"] == (512, 4096)
    size = "all_gather_matmul", 16_384, 4096, 512
    for form in ("plain", "ring"):
        made = overlap_matmuls.compiled_seconds(X2, *size, form, backward=False)
        expected = overlap.modelled_seconds(CostModel(X2), *size, 2)
        apart = expected["plain"] / expected["ring"] - 1
        assert made == pytest.approx(expected[form], rel=apart / 4), apart


def test_where_the_ring_loses():
    found = {"matmul": "down", "operation": "o", "pass": "forward"}
    slower = found | {"modelled_us_compiled": {"plain": 12.0, "chunked": 10.0, "ring": 15.0}}
    faster = found | {"modelled_us_compiled": {"plain": 12.0, "ring": 11.0}}
    assert overlap_matmuls.lost([slower, faster]) == [
        "the ring loses: down, o, forward: +50% against chunked"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h200"}, "is one GPU, which waits for nobody; write h200x8"),
        ({"only": "fsdp,nome"}, "--only nome: groups are fsdp, data, tensor,"),
        ({"only": "data", "config": ("llama-8b",)}, "--only data leaves nothing of --config"),
        ({"config": ("tyni",)}, "did you mean tiny"),
        ({"plot": "/no/such"}, "--plot: there is no folder /no/such"),
        ({"record": "/no/such/file"}, "--record: there is no folder /no/such"),
    ],
    ids=str,
)
@pytest.mark.target
def test_bad_options(options, message, capsys):
    with pytest.raises(UserError, match=message) as error:
        bench.main(bench.Options(**options))
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


def test_committed_figures_are_those_of_the_table():
    text = (RESULTS / "overlap_h200x8.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    steps, alone = [[r for r in found if ("matmul" in r) == which] for which in (False, True)]
    written = (RESULTS / "overlap_h200x8.txt").read_text()
    assert bench.table(steps) in written
    assert overlap_matmuls.table(alone) in written
    assert not [r for r in found if "refused" in r]
    for group in bench.groups(8):
        sides = {r["side"] for r in steps if r["mesh"] == group.mesh}
        assert sides >= {bench.PLAIN, *group.techniques}
