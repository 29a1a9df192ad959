"""What policies keep and repeat in a program for an H200, read from the compiled program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import remat_depth
from experiments.configs import load
from jaxaccel import hlo, optim, sharding
from jaxaccel.train_step import BATCH_KEYS, StepConfig, make_train_step
from pallas_kernels import target

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `target`")


@functools.cache
def measured(policy, depth):
    return remat_depth.measure(target.parse("h200"), depth, policy)


def repeated(policy, depth):
    """Matmul FLOP in shares of the forward pass, beyond those of `none`."""
    base = measured("none", depth)["matmul_flops"]
    return 3 * (measured(policy, depth)["matmul_flops"] / base - 1)


def test_activations_of_a_hundred_layers():
    row = {p: measured(p, 100) for p in ("none", "full", "sqrt", "sqrt:none", "offload")}
    assert not any(r["xla_rematerialised"] for r in row.values())
    held = {policy: r["activations"] for policy, r in row.items()}
    assert held["full"] == pytest.approx(100, abs=1)
    assert held["sqrt"] <= 22
    layer = held["none"] / 100  # of one layer, in its inputs
    assert layer > 5
    assert held["sqrt:none"] == pytest.approx(10 + 10 * layer, rel=0.05)
    assert (held["offload"], row["offload"]["host_activations"]) == (0, 100)
    # XLA's own sum agrees: beside the stacks there is the work of a layer, and copies of the
    # weights of a segment.
    for policy, r in row.items():
        assert 3 < r["temporaries"] - r["activations"] < 16, policy


def test_recomputation_of_a_hundred_layers():
    """The layer's last matmul, half of its FLOP, is not repeated within a checkpoint."""
    assert repeated("full", 100) == pytest.approx(0.5, abs=0.01)
    assert repeated("offload", 100) == pytest.approx(0.5, abs=0.01)
    assert repeated("sqrt", 100) == pytest.approx(1.5, abs=0.01)
    assert repeated("sqrt:none", 100) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("depth", [4, 16, 64, 100])
def test_sqrt_follows_the_root_of_the_depth(depth):
    assert measured("sqrt", depth)["activations"] == pytest.approx(2 * depth**0.5, rel=0.15)


def test_uneven_segments_compile():
    """Three segments of two layers and one of one."""
    row = measured("sqrt", 7)
    assert row["activations"] <= 2 * 7**0.5 + 1
    assert 0 < repeated("sqrt", 7) <= 1.5


def test_offloading_is_in_the_program():
    program = remat_depth.compiled(target.parse("h200"), 100, "offload")
    stack = rf"bf16\[100,{remat_depth.TOKENS},{remat_depth.WIDTH}\]\{{2,1,0:S\(5\)\}}"
    assert re.search(stack, program.as_text())
    size = 100 * remat_depth.TOKENS * remat_depth.WIDTH * 2
    assert program.memory_analysis().host_temp_size_in_bytes >= size


def test_the_table_and_its_picture(tmp_path):
    rows = [measured(policy, 100) for policy in ("none", "full", "offload")]
    lines = remat_depth.table(rows).splitlines()
    assert lines[2].split() == ["full", "100", "100.0", "0.0", *lines[2].split()[4:]]
    assert lines[2].endswith("16.7 %")
    remat_depth.plot(rows, tmp_path / "depth.png")
    assert (tmp_path / "depth.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_llama_1b3():
    """Batch 4, sequence 4096, bfloat16: `full` and `selective` against `none`."""
    config = load("llama-1b3")
    gpu = target.parse("h200")

    def read(policy):
        step = make_train_step(
            config.model,
            optim.adamw(config.optimizer, 100),
            StepConfig(precision="bfloat16", remat=policy),
            gpu.mesh(sharding.parse_mesh("", 1)),
        )
        tokens = jax.ShapeDtypeStruct((4, config.sequence), jnp.int32, sharding=step.batch_sharding)
        program = gpu.compile(step.step, step.abstract_state, dict.fromkeys(BATCH_KEYS, tokens))
        text = program.as_text()
        assert not re.search(r"\.remat\b", text)
        module = hlo.parse(text)
        stacks = sum(
            shape.bytes
            for computation in module.computations.values()
            for node in computation.instructions.values()
            if node.opcode == "while"
            for shape in node.shapes
            if shape.dims[:1] == (config.model.layers,)
            and {config.sequence, 4 * config.sequence} & {*shape.dims}
        )
        return remat_depth.matmul_flops(module), stacks / 2

    flops, stacks = np.transpose([read(policy) for policy in ("none", "selective", "full")])
    assert 0.17 <= flops[2] / flops[0] - 1 <= 0.28
    assert 0 <= flops[1] / flops[0] - 1 <= 0.05
    assert stacks[1] <= 0.5 * stacks[0]
    one_input = 2 * 4 * config.sequence * config.model.width
    assert stacks[2] == config.model.layers * one_input
