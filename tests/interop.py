"""The table of techniques, which of them exclude each other, and runs in which each pair meets.

What a run does and what is asserted of it is in `test_interop.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxaccel.decoder_config import DecoderConfig, MtpConfig

LLAMA = DecoderConfig(
    vocab_size=64, layers=4, width=32, heads=4, kv_heads=2, head_size=4, mlp_width=64,
    rope_theta=100.0,
)  # fmt: skip
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, tied_head=True)
GEMMA2 = dataclasses.replace(
    LLAMA, windows=(6,), zero_centered_norm=True, post_norms=True, tied_head=True,
    activation="gelu_tanh", embedding_scale=32**0.5, attention_soft_cap=50.0, logits_soft_cap=30.0,
    attention_scale=4**-0.5,
)  # fmt: skip

# How far losses may be from the plain ones, as a share of these: the first, and the one after ten
# steps. Where techniques meet their bounds add up.
Bounds = tuple[float, float]
EXACT = 1e-6, 1e-5  # of all: sums in another order, which steps of an optimizer amplify
BFLOAT16 = 1e-3, 5e-3  # 8 bits of a value
FLOAT16 = 1e-4, 3e-3  # 11 bits
EIGHT_BITS = 2e-2, 4e-2  # 4 bits, in matmuls
MOMENTS = 0.0, 2e-3  # 8 bits, of what the first loss does not depend on


class Technique(NamedTuple):
    """A line of the table."""

    group: str  # of which a run has one at most
    options: Mapping[str, Any] = {}  # of `Setup`, or else of `StepConfig`
    needs: tuple[str, ...] = ()  # techniques that come with it
    bounds: Bounds = (0.0, 0.0)  # of one that is approximate
    plain: Mapping[str, Any] = {}  # options of the plain run that it is compared with
    cost: float = 1.0  # how much longer a step takes to be compiled with it, about
    like: str = ""  # one that stands for it in pairs: runs take turns


def another(group: str, cost: float = 1.0, **options: Any) -> Technique:
    """One that changes the objective, or the way there: the plain run has it too."""
    return Technique(group, options, plain=options, cost=cost)


def eight_bits(recipe: str, cost: float) -> Technique:
    """FP8 in the MLP, whose matmuls are cut both by columns and by rows."""
    return Technique(
        "fp8", {"fp8": recipe, "fp8_layers": "gate,up,down"}, bounds=EIGHT_BITS, cost=cost
    )


def folder(model: DecoderConfig, like: str = "") -> Technique:
    """A released model, read from a folder; the plain run is handed the same parameters."""
    options, plain = {"model": model, "folder": True}, {"model": model}
    return Technique("folder", options, plain=plain, cost=1.2, like=like)


def stages(pipeline: str, like: str = "") -> Technique:
    return Technique("pipeline", {"pipeline": pipeline, "axes": "stage"}, cost=1.6, like=like)


def hidden(name: str, axis: str, cost: float) -> Technique:
    return Technique(f"overlap {name}", {"overlap": name}, (axis,), cost=cost)


FREEZE = "embedding", "*.key.kernel"
TECHNIQUES: dict[str, Technique] = {
    "float32": Technique("precision", {"precision": "float32"}),
    "bfloat16": Technique("precision", {"precision": "bfloat16"}, bounds=BFLOAT16),
    "float16": Technique("precision", {"precision": "float16"}, bounds=FLOAT16),
    "remat none": Technique("remat", {"remat": "none"}),
    "remat attention": Technique("remat", {"remat": "attention"}),
    "remat selective": Technique("remat", {"remat": "selective"}),
    "remat full": Technique("remat", {"remat": "full"}),
    "remat sqrt": Technique("remat", {"remat": "sqrt"}),
    "remat names": Technique(
        "remat", {"remat": "names:key,mlp_gate,attention_norm"}, like="remat selective"
    ),
    "fp8 current": eight_bits("current", 1.1),
    "fp8 delayed": eight_bits("delayed", 1.2),
    "fp8 block": eight_bits("block", 1.6),
    "adamw-8bit": Technique("optimizer", {"optimizer": "adamw-8bit"}, bounds=MOMENTS, cost=1.4),
    "lion-8bit": Technique(
        "optimizer", {"optimizer": "lion-8bit"}, bounds=MOMENTS, plain={"optimizer": "lion"}
    ),
    "muon": another("optimizer", optimizer="muon"),
    "micro-batches": Technique("micro-batches", {"micro_batches": 2}, cost=1.2),
    "mtp sequential": another("mtp", mtp=MtpConfig(1, "sequential"), cost=1.4),
    "mtp parallel": another("mtp", mtp=MtpConfig(1, "parallel"), cost=1.4),
    "attention xla": Technique("attention", {"attention": "xla"}),
    "kernels xla": Technique("kernels", {"kernels": "xla"}),
    "freeze": another("freeze", freeze=FREEZE),
    "qwen3 folder": folder(QWEN3),
    "gemma2 folder": folder(GEMMA2, like="qwen3 folder"),
    "data": Technique("data", {"axes": "data"}),
    "fsdp": Technique("fsdp", {"axes": "fsdp"}),
    "sequence": Technique("sequence", {"axes": "sequence"}, cost=1.2),
    "tensor": Technique("tensor", {"axes": "tensor"}),
    "zero": Technique("zero", {"zero": 1}, needs=("data",)),
    "fsdp-prefetch": hidden("fsdp-prefetch", "fsdp", 1.4),
    "buckets": hidden("buckets", "data", 1.4),
    "domino": hidden("domino", "tensor", 1.3),
    "positions": hidden("sequence", "tensor", 1.1),  # sequence parallelism, which is no mesh axis
    "collective-matmul": hidden("collective-matmul", "tensor", 1.2),
    "ring-attention": hidden("ring-attention", "sequence", 1.6),
    "gpipe": stages("gpipe", like="1f1b"),
    "1f1b": stages("1f1b"),
    "interleaved": stages("interleaved", like="1f1b"),
}
# What a CPU cannot run, why, and where it is tested.
ELSEWHERE = {
    "remat offload": (
        "policy offloads to host memory, and cpu has none of its own",
        "jaxaccel/test_remat_compiled.py::test_offloading_is_in_the_program",
    )
}
OVERLAPS = [name for name, t in TECHNIQUES.items() if "overlap" in t.options]
PIPELINES = [name for name, t in TECHNIQUES.items() if t.group == "pipeline"]
AXES = 3  # of two devices each; there are eight devices

Names = frozenset[str]


def _called(overlap: str) -> str:
    return f"overlap {TECHNIQUES[overlap].options['overlap']!r}"


# What does not combine, and how the error says so. Heads that read the next position are refused
# where it is on another device and what travels is written out: three are needed for that.
PARTED = (
    "overlap with a row's positions on several devices and sequential heads (mtp) do not combine: "
    "a head reads the next position"
)
REFUSED: dict[Names, str] = {
    frozenset({"domino", "fp8 current"}): (
        "overlap 'domino' and fp8 'current' do not combine: a scale is that of the whole tensor"
    ),
    frozenset({"domino", "gemma2 folder"}): (
        "overlap 'domino' and a model with post_norms do not combine: a block's sum over devices "
        "would have to be there before its norm"
    ),
    frozenset({"ring-attention", "gemma2 folder"}): (
        "overlap 'ring-attention' has no sliding windows, and the model has (6,)"
    ),
    **{
        frozenset({"remat sqrt", name}): (
            f"{_called(name)} and remat 'sqrt' do not combine: the loop that gathers ahead or "
            "reduces behind takes a layer at a time"
        )
        for name in ("fsdp-prefetch", "buckets")
    },
    **{
        frozenset({pipeline, name}): f"{_called(name)} and a pipeline do not combine: "
        for pipeline, name in itertools.product(PIPELINES, OVERLAPS)
        if name != "positions"
    },
    **{frozenset({"mtp sequential", name}): PARTED for name in ("positions", "ring-attention")},
    **{
        frozenset({"mtp sequential", "sequence", name}): PARTED
        for name in (*PIPELINES, *OVERLAPS)
        if name not in ("positions", "ring-attention")
    },
}

# As many as there can be at once.
ALL_TOGETHER: Names = frozenset({
    "bfloat16", "remat full", "fp8 delayed", "adamw-8bit", "micro-batches", "mtp parallel",
    "attention xla", "kernels xla", "freeze", "qwen3 folder", "data", "fsdp", "tensor", "zero",
    "fsdp-prefetch", "buckets", "domino", "positions", "collective-matmul",
})  # fmt: skip


class Setup(NamedTuple):
    """All that tells one run from another; of hashable parts."""

    axes: tuple[str, ...] = ()  # of the mesh, two devices each
    model: DecoderConfig = LLAMA
    folder: bool = False  # parameters are read from one
    optimizer: str = "adamw"
    step: tuple[tuple[str, Any], ...] = ()  # options of `StepConfig`


def setup(options: Iterable[Mapping[str, Any]]) -> Setup:
    """A run with all of these options; names of overlaps and axes are joined."""
    pairs = [pair for each in options for pair in each.items()]
    joined = {key: tuple(x for k, x in pairs if k == key) for key in ("axes", "overlap")}
    merged = dict(pairs) | {"axes": joined["axes"], "overlap": ",".join(joined["overlap"])}
    step = {"remat": "none"} | {k: x for k, x in merged.items() if k not in Setup._fields and x}
    own = {key: value for key, value in merged.items() if key in Setup._fields}
    return Setup(**own, step=tuple(sorted(step.items())))


def chosen(names: Names) -> list[Technique]:
    """In the table's order."""
    return [technique for name, technique in TECHNIQUES.items() if name in names]


def techniques(names: Names) -> Setup:
    return setup(technique.options for technique in chosen(names))


def plain(names: Names) -> Setup:
    """In float32, on one device, with none of the techniques that are to leave the result alone."""
    return setup(technique.plain for technique in chosen(names))


def bounds(names: Names) -> Bounds:
    first, tenth = zip(EXACT, *(technique.bounds for technique in chosen(names)))
    return sum(first), sum(tenth)


# --- which runs -------------------------------------------------------------------------


def closed(names: Iterable[str]) -> Names:
    """With what comes with them."""
    names = frozenset(names)
    return names.union(*(TECHNIQUES[name].needs for name in names))


def possible(names: Names) -> bool:
    """Whether a run can have all of them: one of a group, eight devices, nothing refused."""
    groups = [TECHNIQUES[name].group for name in names]
    axes = sum("axes" in TECHNIQUES[name].options for name in names)
    refused = any(together <= names for together in REFUSED)
    return len(set(groups)) == len(groups) and axes <= AXES and not refused


def alone(name: str) -> Names:
    """A technique, and what a run has where it has nothing else of the group."""
    names = closed({name})
    groups = {TECHNIQUES[name].group for name in names}
    return names | {
        name for name in ("float32", "remat none") if TECHNIQUES[name].group not in groups
    }


def stand_ins(names: Names) -> Names:
    return frozenset(TECHNIQUES[name].like or name for name in names)


def pairs(names: Iterable[str]) -> set[Names]:
    return set(map(frozenset, itertools.combinations(names, 2)))


def all_pairs() -> set[Names]:
    """Every pair that can be combined, of those that stand for others too."""
    return {pair for pair in pairs(stand_ins(TECHNIQUES)) if possible(closed(pair))}


def cost(run: Names) -> float:
    """About how many seconds it takes: to compile, which is nearly all, and the rest."""
    return 1.0 + 2.0 * math.prod(technique.cost for technique in chosen(run))


def covering() -> list[Names]:
    """Runs in which, beside those of one technique, every possible pair meets; found greedily.

    A run is worth the pairs that meet in it and did not before, for what it costs (the exponent is
    that of several at which all runs together cost least). It grows from one technique by the one
    that makes it worth most, for as long as that is more; of the runs that grow from each
    technique, the best is taken. `ALL_TOGETHER` counts as the first.
    """
    names = sorted(stand_ins(TECHNIQUES), key=list(TECHNIQUES).index)
    left = all_pairs().difference(*map(pairs, [ALL_TOGETHER, *map(alone, names)]))
    worth = lambda run: len(pairs(run) & left) / cost(run) ** 0.7
    runs = []
    while left:
        best = max((_grow(closed({name}), names, worth) for name in names), key=worth)
        left -= pairs(best)
        runs.append(best)
    return [_turned(run, turn) for turn, run in enumerate(runs)]


def _grow(run: Names, names: list[str], worth: Callable[[Names], float]) -> Names:
    while True:
        larger = [closed({*run, name}) for name in names if name not in run]
        best = max(filter(possible, larger), key=worth, default=run)
        if worth(best) <= worth(run):
            return run
        run = best


def _turned(run: Names, turn: int) -> Names:
    """The run with others in place of those that stand for them, where it can have them."""
    for name in (name for name in TECHNIQUES if name in run):
        alike = [name, *(other for other, t in TECHNIQUES.items() if t.like == name)]
        other = run - {name} | {alike[turn % len(alike)]}
        run = other if possible(other) else run
    return run
