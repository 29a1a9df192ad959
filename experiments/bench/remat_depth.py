"""How the memory and the recomputation of a stack of layers grow with its depth, by policy.

    python -m experiments.bench.remat_depth [--json] [--plot FILE] [--depths 4 16 64 100]

Compiles the gradient of a stack of equal layers (a norm, two matmuls, a residual; bfloat16)
for a GPU that need not be there, and reads the program: nothing is run or timed, every
figure is *compiled*. Needs the extra `target`.

Activations are the buffers that the program's loops stack up, a slice a layer or a segment,
for another loop to read. They and all temporaries (XLA's own sum, in which the work of one
layer and copies of one segment's weights and weight gradients take part) are in units of one
layer's input. Recomputation is matmul FLOP over those of `none`, less one.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from experiments import cli
from experiments.errors import user_errors
from jaxaccel import hlo, matmuls, names, remat
from pallas_kernels import rms_norm, target

TOKENS, WIDTH, HIDDEN = 16_384, 512, 1024


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiles stacks of layers under rematerialisation policies and reads their memory."""

    target: str = "h200"
    depths: tuple[int, ...] = (4, 16, 64, 100)
    policies: tuple[str, ...] = ("none", "selective", "full", "sqrt", "sqrt:none", "offload")
    json: bool = False
    """One JSON object a depth and policy and line, and nothing else on standard output."""
    plot: str = ""
    """Also draw activations against depth into this file."""


def layer(x, weights):
    """One layer of the stack, its tensors named as in the decoder."""
    x = names.tag(x, names.LAYER_INPUT)
    y = names.tag(rms_norm.rms_norm(x, jnp.ones(WIDTH), 1e-5), names.MLP_NORM)
    y = names.tag(y @ weights["up"], names.MLP_UP)
    y = names.tag(jax.nn.silu(y), names.MLP_ACTIVATION)
    return x + names.tag(y @ weights["down"], names.MLP_OUTPUT), None


def compiled(gpu: target.Target, depth: int, policy: str) -> jax.stages.Compiled:
    """The gradient of a stack under a policy, as `gpu` would run it."""

    def loss(weights, x):
        x, _ = remat.scan(layer, x, weights, policy=policy)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    weights = {"up": shape(depth, WIDTH, HIDDEN), "down": shape(depth, HIDDEN, WIDTH)}
    return gpu.compile(jax.jit(jax.value_and_grad(loss)), weights, shape(TOKENS, WIDTH))


def stacked(module: hlo.Module) -> tuple[float, float]:
    """Activations that loops stack up, on the device and on the host, in layer inputs.

    Of the arrays that loops carry, weights and gradients have no dimension of tokens, and
    what is not stacked has but two dimensions. One loop writes a stack, another reads it.
    """
    found = [0, 0]
    for computation in module.computations.values():
        for node in computation.instructions.values():
            for shape in node.shapes if node.opcode == "while" else ():
                if len(shape.dims) > 2 and TOKENS in shape.dims:
                    found[shape.host] += shape.bytes
    unit = 2 * TOKENS * WIDTH
    return found[0] / 2 / unit, found[1] / 2 / unit


def matmul_flops(module: hlo.Module) -> float:
    """FLOP of all matmuls that a program runs; loops count by their trip count."""
    return sum(m.count * m.flops for m in matmuls.matmuls(module))


def measure(gpu: target.Target, depth: int, policy: str) -> dict[str, Any]:
    """One line of the table; `matmul_flops` becomes a share in `table`."""
    program: Any = compiled(gpu, depth, policy)  # of a GPU, where no analysis is missing
    text, memory = program.as_text(), program.memory_analysis()
    module = hlo.parse(text)
    unit = 2 * TOKENS * WIDTH
    device, host = stacked(module)
    return {
        "policy": policy,
        "layers": depth,
        "activations": device,
        "host_activations": host,
        "temporaries": memory.temp_size_in_bytes / unit,
        "matmul_flops": matmul_flops(module),
        "xla_rematerialised": bool(re.search(r"\.remat\b", text)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The results for people."""
    base = {r["layers"]: r["matmul_flops"] for r in rows if r["policy"] == "none"}
    lines = [
        "policy      layers  activations  on the host  temporaries  2 sqrt(L)  recomputation",
    ]
    for r in rows:
        again = r["matmul_flops"] / base[r["layers"]] - 1 if r["layers"] in base else math.nan
        lines.append(
            f"{r['policy']:<10} {r['layers']:>7}  {r['activations']:>11.1f}  "
            f"{r['host_activations']:>11.1f}  {r['temporaries']:>11.1f}  "
            f"{2 * math.sqrt(r['layers']):>9.1f}  {100 * again:>11.1f} %"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Activations against depth, a line a policy, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for policy in dict.fromkeys(r["policy"] for r in rows):
        mine = [r for r in rows if r["policy"] == policy]
        held = [r["activations"] for r in mine]
        if any(held):
            axes.loglog([r["layers"] for r in mine], held, marker="o", label=policy)
    depths = sorted({r["layers"] for r in rows})
    bound = [2 * math.sqrt(depth) for depth in depths]
    axes.loglog(depths, bound, "k:", label="2 sqrt(L)")
    axes.set(xlabel="layers", ylabel="activations kept (compiled), in layer inputs")
    axes.set_xticks(depths, map(str, depths))
    axes.minorticks_off()
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(options: Options) -> None:
    """Compiles, and prints the results."""
    with user_errors():
        gpu = target.parse(options.target)
    rows = []
    for depth in options.depths:
        for policy in options.policies:
            rows.append(measure(gpu, depth, policy))
            if options.json:
                print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(table(rows))
    if options.plot:
        plot(rows, Path(options.plot))


if __name__ == "__main__":
    cli.run(main, Options)
