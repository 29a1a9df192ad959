"""The matmuls of a tensor-parallel layer by form: what the formula says, and what XLA made of it.

Part of `experiments.bench.overlap`. Both times are *modelled*: the formula's
(`overlap.modelled_seconds`, by which `overlap.choose` chooses), and the compiled program's,
played by `jaxaccel.timeline`. Each pass is a program of its own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import hlo, overlap, timeline
from jaxaccel.cost import CostModel
from jaxaccel.nn import DecoderConfig
from jaxaccel.target import Target

AXIS = "tensor"
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FUNCTIONS: dict[str, Callable] = {
    name: getattr(overlap, name) for name in (GATHER, SCATTER, REDUCE)
}
FORMS = ("plain", "chunked", "chunked:4", "ring")  # that `overlap.choose` chooses among
ROWS = tuple(2**k for k in range(10, 19))  # at which the ring is asked for


def shapes(model: DecoderConfig, devices: int) -> dict[tuple[str, str], tuple[int, int]]:
    """K and N of one device, by matmul and operation; weights of one input are one matmul."""
    heads, mlp = model.heads * model.head_size // devices, model.mlp_width // devices
    keys = 2 * model.kv_heads * model.head_size // devices
    found = {
        ("query, key, value", GATHER): (model.width, heads + keys),
        ("gate, up", GATHER): (model.width, 2 * mlp),
    }
    for operation in (SCATTER, REDUCE):
        found["attention output", operation] = heads, model.width
        found["down", operation] = mlp, model.width
    return found


def compiled_seconds(
    on: Target, operation: str, rows: int, k: int, n: int, form: str, *, backward: bool
) -> float:
    """*Modelled* time of one pass, compiled alone for all GPUs of `on`."""
    mesh, devices = on.mesh({AXIS: on.count}), on.count
    by_rows, by_columns = P(AXIS), P(None, AXIS)
    if operation == GATHER:
        specs, out = (by_rows, by_columns), by_columns
        sizes, made = ((rows, k), (k, devices * n)), (rows, devices * n)
    else:
        specs, out = (by_columns, by_rows), by_rows if operation == SCATTER else P()
        sizes, made = ((rows, devices * k), (devices * k, n)), (rows, n)
    forward = functools.partial(FUNCTIONS[operation], axis_name=AXIS, form=form)
    function, in_specs = forward, specs
    if backward:
        function = lambda x, w, dy: jax.vjp(forward, x, w)[1](dy)
        in_specs, out, sizes = (*specs, out), specs, (*sizes, made)
    arguments = [
        jax.ShapeDtypeStruct(size, "bfloat16", sharding=NamedSharding(mesh, spec))
        for size, spec in zip(sizes, in_specs)
    ]
    step = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out))
    text = on.compile(step, *arguments).as_text() or ""
    return timeline.simulate(hlo.parse(text), CostModel(on)).seconds


def rows(model: DecoderConfig, on: Target, tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each matmul and pass in which forms differ.

    Args:
      model: whose layer.
      on: its GPUs are all on the axis.
      tokens: of a batch.
    """
    cost, n = CostModel(on), on.count
    for (name, operation), (k, columns) in shapes(model, n).items():
        for backward in (False, True):
            of = functools.partial(overlap.modelled_seconds, cost, operation, backward=backward)
            choose = functools.partial(overlap.choose, cost, operation, backward=backward)
            formula = {form: s for form, s in of(tokens, k, columns, n).items() if form in FORMS}
            if len(set(formula.values())) == 1:
                continue  # a backward pass that every form shares
            args = on, operation, tokens, k, columns
            yield {
                "matmul": name,
                "operation": operation,
                "pass": "backward" if backward else "forward",
                "rows": tokens,
                "k": k,
                "n": columns,
                "chosen": choose(tokens, k, columns, n),
                "modelled_us_formula": {form: 1e6 * s for form, s in formula.items()},
                "modelled_us_compiled": {
                    form: 1e6 * compiled_seconds(*args, form, backward=backward) for form in formula
                },
                "ring_chosen_at_rows": [r for r in ROWS if choose(r, k, columns, n) == "ring"],
            }


def spans(chosen: Sequence[int]) -> str:
    """Where the ring is chosen, in words.

    Example:
      >>> spans([4096, 8192]), spans([131072, 262144]), spans([])
      ('4,096 to 8,192', 'from 131,072', 'never')
    """
    if not chosen:
        return "never"
    if chosen[-1] == ROWS[-1]:
        return f"from {chosen[0]:,}"
    return f"{chosen[0]:,} to {chosen[-1]:,}"


def table(found: Sequence[dict[str, Any]]) -> str:
    """The matmuls for people, a block for each config."""
    lines = []
    for config in dict.fromkeys(r["config"] for r in found):
        mine = [r for r in found if r["config"] == config]
        lines += [
            "",
            f"matmuls of {config} on {mine[0]['target']}, {mine[0]['mesh']}, {mine[0]['rows']:,} "
            "rows: microseconds of the formula / of the compiled program, both modelled",
            f"{'':<50}"
            + "".join(f"{form:>14}" for form in FORMS)
            + f"  {'chosen':<10} ring chosen",
        ]
        for r in mine:
            formula, made = r["modelled_us_formula"], r["modelled_us_compiled"]
            cells = [f"{formula[f]:,.0f} / {made[f]:,.0f}" if f in formula else "-" for f in FORMS]
            what = f"{r['matmul']}, {r['operation']}, {r['pass']}"
            where = spans(r["ring_chosen_at_rows"]) if "ring" in formula else "-"
            line = f"{what:<50}" + "".join(f"{c:>14}" for c in cells)
            lines.append(f"{line}  {r['chosen']:<10} {where}")
        lines += lost(mine)
    return "\n".join(lines[1:])


def lost(found: Sequence[dict[str, Any]]) -> list[str]:
    """Where the ring is slower than the best other form, as compiled."""
    lines = []
    for r in found:
        made = dict(r["modelled_us_compiled"])
        ring = made.pop("ring", None)
        best = min(made, key=made.__getitem__)
        if ring is not None and ring > made[best]:
            lines.append(
                f"the ring loses: {r['matmul']}, {r['operation']}, {r['pass']}: "
                f"{ring / made[best] - 1:+.0%} against {best}"
            )
    return lines
