"""What a training step is asked to do, and the values that follow from it.

A technique reaches the model as a value for one of its arguments, or stands around it; here a
configuration becomes those values. `train_step` puts them together.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from jaxaccel import accumulate, fp8, fp8_fused, losses, nn, remat, schedules, sharding
from jaxaccel.fp8 import Quantized, Scaling
from jaxaccel.nn import Between, Decoder, DecoderConfig, MtpConfig
from jaxaccel.precision import LossScaleConfig
from jaxaccel.remat import Policy
from jaxaccel.schedules import Schedule
from pallas_kernels import rms_norm as norm_op
from pallas_kernels import swiglu as glu_op

# What hides behind compute, and along which axes of the mesh it travels; see `overlap`.
OVERLAPS: dict[str, tuple[str, ...]] = {
    "fsdp-prefetch": ("fsdp", "sequence"),
    "buckets": ("data",),
    "domino": ("tensor",),
    "sequence": ("tensor",),
    "collective-matmul": ("tensor",),
    "ring-attention": ("sequence",),
}


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a training step does beyond the model and the optimizer."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    attention: Literal["auto", "xla"] = "auto"  # see `pallas_kernels.attention`
    kernels: Literal["auto", "xla"] = "auto"  # of norms, activations and the loss
    remat: Policy = "selective"
    micro_batches: int = 1
    clip_norm: float = 1.0
    z_loss: float = 0.0
    loss_scale: LossScaleConfig = LossScaleConfig()
    fp8: Literal["off", "current", "delayed", "block"] = "off"
    fp8_layers: str = "*"  # shell patterns of names in `nn.linear_shapes`, comma-separated
    fp8_scaling: Scaling = Scaling()
    mtp: MtpConfig = MtpConfig()
    overlap: str = "none"  # or names of `OVERLAPS`, comma-separated
    freeze: tuple[str, ...] = ()  # patterns of parameters that stay; see `optim.trainable`
    zero: Literal[0, 1] = 0  # 1: optimizer state is cut over the mesh's `data` as well
    bucket_mib: float = 30.0  # of `buckets`: gradients of a layer are joined up to this size
    pipeline: schedules.Kind = "1f1b"  # of a mesh with stages; see `schedules`
    chunks: int = 2  # of `interleaved`: runs of layers on each stage
    delayed_sends: bool = False  # a transfer has a whole tick
    stage_layers: tuple[int, ...] = ()  # of each run of layers, in order; empty: as even as can be

    def __post_init__(self):
        segmented = remat.parse(self.remat)[1]
        if self.prefetched and segmented:
            raise ValueError(
                f"overlap {self.overlap!r} and remat {self.remat!r} do not combine: the loop that "
                "gathers ahead or reduces behind takes a layer at a time; choose a policy without "
                "sqrt"
            )
        if not 0 < self.bucket_mib < float("inf"):
            raise ValueError(f"bucket_mib is {self.bucket_mib}; it must be above 0, and finite")
        if not 0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss is {self.z_loss}; it must be 0 or more, and finite")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be positive (inf: no clip)")

    @property
    def implementations(self) -> tuple[str | None, str | None]:
        """Of attention, and of the other ops, as `pallas_kernels` takes them."""
        given = lambda choice: None if choice == "auto" else choice
        return given(self.attention), given(self.kernels)

    @property
    def techniques(self) -> frozenset[str]:
        """The names that `overlap` lists."""
        listed = frozenset(name.strip() for name in self.overlap.split(","))
        if listed == {"none"}:
            return frozenset()
        if unknown := listed - OVERLAPS.keys():
            raise ValueError(
                f"cannot read {', '.join(map(repr, sorted(unknown)))} of overlap {self.overlap!r}; "
                f"write none, or several of {', '.join(OVERLAPS)}"
            )
        return listed

    @property
    def prefetched(self) -> bool:
        """Whether the loop over layers gathers ahead and reduces behind."""
        return bool({"fsdp-prefetch", "buckets"} & self.techniques)


def check_overlap(model: DecoderConfig, config: StepConfig, sizes: Mapping[str, int]) -> None:
    """Refuses techniques that the mesh or the model leaves nothing to do.

    Args:
      model: the decoder.
      config: of the step.
      sizes: of the mesh, by axis.

    Raises:
      ValueError: a technique whose axes have one device, heads that do not divide, windows in a
        ring, norms behind a block that Domino halves, heads that predict ahead from positions on
        another device.
    """
    # Its loop adds a micro-batch's gradients where the sum lies, also where nothing travels.
    useful = {"fsdp-prefetch"} if config.micro_batches > 1 else set()
    for name in sorted(config.techniques - useful):
        if all(sizes[axis] == 1 for axis in OVERLAPS[name]):
            axes = " or ".join(OVERLAPS[name])
            raise ValueError(
                f"overlap {name!r} hides what travels along {axes}, and the mesh has one device "
                f"there; make it longer, say {OVERLAPS[name][0]}=2, or leave {name!r} out"
            )
    explicit = config.techniques or sizes["stage"] > 1
    if explicit and model.kv_heads % sizes["tensor"]:
        raise ValueError(
            f"{model.kv_heads} key/value heads do not divide by tensor={sizes['tensor']}; with "
            f"overlap or stages it must be a divisor of {model.kv_heads}"
        )
    if "ring-attention" in config.techniques and any(model.windows):
        raise ValueError(
            f"overlap 'ring-attention' has no sliding windows, and the model has {model.windows}; "
            "leave it out: keys and values are then gathered"
        )
    if "domino" in config.techniques and model.post_norms:
        raise ValueError(
            "overlap 'domino' and a model with post_norms do not combine: a block's sum over "
            "devices would have to be there before its norm; leave domino out"
        )
    if "domino" in config.techniques and config.fp8 == "current":
        raise ValueError(
            "overlap 'domino' and fp8 'current' do not combine: a scale is that of the whole "
            "tensor, and each half would wait for the other; choose delayed, or leave domino out"
        )
    parted = sizes["sequence"] > 1 or "sequence" in config.techniques
    if explicit and parted and config.mtp.depth and config.mtp.kind == "sequential":
        raise ValueError(
            "overlap with a row's positions on several devices and sequential heads (mtp) do not "
            "combine: a head reads the next position; choose parallel heads, or leave one out"
        )


def schedule(config: StepConfig, stages: int) -> Schedule:
    """The pipeline's schedule, on so many stages."""
    chunks = config.chunks if config.pipeline == "interleaved" else 1
    return schedules.schedule(
        config.pipeline, stages, config.micro_batches, chunks=chunks, delayed=config.delayed_sends
    )


def runs(model: DecoderConfig, config: StepConfig, pipeline: Schedule) -> tuple[int, ...]:
    """Lengths of the runs of layers that stages have, in the model's order.

    In groups of layers, where a model's layers are unlike and repeat in groups.

    Raises:
      ValueError: more runs than layers, layers that the stages cannot keep in equal parts, or
        `stage_layers` that do not fit.
    """
    count, of = pipeline.stages * pipeline.chunks, len(model.windows)
    groups = model.layers // of
    unit = "layers" if of == 1 else f"groups of {of} layers"
    if count > groups:
        raise ValueError(
            f"stage={pipeline.stages} with {pipeline.chunks} run{'s' * (pipeline.chunks > 1)} of "
            f"layers each needs {count} {unit}, and the model has {groups}"
        )
    if groups % pipeline.stages:
        legal = ", ".join(str(n) for n in range(2, groups + 1) if groups % n == 0)
        raise ValueError(
            f"{groups} {unit} do not divide over stage={pipeline.stages}, which keep equal parts; "
            f"legal numbers of stages: {legal}"
        )
    if not config.stage_layers:
        less, more = divmod(groups, count)
        return (less + 1,) * more + (less,) * (count - more)
    lengths = tuple(layers // of for layers in config.stage_layers)
    if (
        len(lengths) != count
        or min(config.stage_layers) < of
        or any(layers % of for layers in config.stage_layers)
        or sum(lengths) != groups
    ):
        multiples = f"multiples of {of} from {of}" if of > 1 else "1 or more each"
        raise ValueError(
            f"stage_layers {config.stage_layers} must be {count} numbers, {multiples}, that add up "
            f"to {model.layers}"
        )
    return lengths


def check_pipeline(model: DecoderConfig, config: StepConfig, stages: int) -> None:
    """Refuses a pipeline that cannot run, and options for one that is not there.

    Args:
      model: the decoder.
      config: of the step.
      stages: of the mesh.

    Raises:
      ValueError: as `runs`; techniques that have nothing to do beside stages.
    """
    if stages == 1:
        default = StepConfig()
        options = ("pipeline", "chunks", "delayed_sends", "stage_layers")
        if given := [name for name in options if getattr(config, name) != getattr(default, name)]:
            raise ValueError(
                f"{', '.join(given)} is for a pipeline, and the mesh has no stages; give it some, "
                "say stage=2, or leave it out"
            )
        return
    if config.pipeline != "interleaved" and config.chunks != StepConfig.chunks:
        raise ValueError(
            f"chunks is {config.chunks}, and pipeline {config.pipeline!r} has one run of layers a "
            "stage; choose interleaved, or leave chunks out"
        )
    reasons = {
        "fsdp-prefetch": "a stage gathers its weights once a step",
        "buckets": "a stage's gradients are summed once a step",
        "domino": "its halves and the stages' micro-batches are not interleaved",
        # On CPUs a permute in a branch that other stages skip gives wrong values; on GPUs nobody
        # has seen it.
        "ring-attention": "its permutes would run in a branch that other stages skip",
        "collective-matmul": "its permutes would run in a branch that other stages skip",
    }
    for name in sorted(config.techniques & reasons.keys()):
        raise ValueError(
            f"overlap {name!r} and a pipeline do not combine: {reasons[name]}; leave one out"
        )
    runs(model, config, schedule(config, stages))


def check_batch(config: StepConfig, sizes: Mapping[str, int], rows: int, length: int) -> None:
    """Refuses a batch that does not divide over the mesh.

    Args:
      config: of the step.
      sizes: of the mesh, by axis.
      rows: of the whole batch.
      length: tokens of a row.

    Raises:
      ValueError: rows or length that do not divide, and legal ones.
    """
    shards = sizes["data"] * sizes["fsdp"]
    halves = 2 if "domino" in config.techniques else 1
    unit = shards * config.micro_batches * halves
    if rows < 1 or rows % unit:
        below = rows // unit
        legal = " or ".join(str(n * unit) for n in (below, below + 1) if n > 0)
        two = " x 2 halves (domino)" * (halves - 1)
        raise ValueError(
            f"a batch of {rows} rows does not divide by {shards} devices x {config.micro_batches} "
            f"micro-batches{two}; legal are multiples of {unit}, say {legal}"
        )
    chunks = sizes["sequence"] * (2 if "ring-attention" in config.techniques else 1)
    chunks *= sizes["tensor"] if "sequence" in config.techniques else 1
    if length % chunks:
        raise ValueError(
            f"rows of {length} tokens do not divide by the {chunks} parts that positions are cut "
            f"into (mesh sequence={sizes['sequence']}, overlap {config.overlap!r}); legal are "
            f"multiples of {chunks}"
        )


def layer_bytes(params: PyTree, dtype: Any) -> int:
    """Bytes of one layer in the compute dtype; of one group of them, where they are unlike."""
    stacked = jax.tree.leaves(params["layers"])
    width = lambda x: jnp.dtype(dtype if x.ndim > 2 else jnp.float32).itemsize  # of norms: 4
    return sum(math.prod(x.shape[1:]) * width(x) for x in stacked)


def merge(total: tuple, part: tuple) -> tuple:
    """Sums of two micro-batches: `((nll, gradients), fp8)`; FP8 state merges by maximum."""
    return accumulate.add(total[0], part[0]), jax.tree.map(jnp.maximum, total[1], part[1])


def matmuls(
    model: DecoderConfig, config: StepConfig, *, warm_start: bool, devices: int
) -> dict[str, Callable]:
    """The matmul of each linear layer, by name, on so many devices."""
    shapes = nn.linear_shapes(model, config.mtp)
    # An order of a layer's gradients saves memory where the layer is made again as a whole. Of
    # several devices it costs more than it saves where XLA hides what travels behind what it finds
    # within the layer; the loop that gathers ahead hides it behind the next one.
    ahead = config.prefetched and config.techniques <= {"fsdp-prefetch", "buckets"}
    first = (devices == 1 or ahead) and config.remat in ("full", "sqrt")
    plain = remat.weights_first if first else jax.lax.dot_general
    if config.fp8 == "off":
        return dict.fromkeys(shapes, plain)
    options = {"warm_start": warm_start, "weights_first": first}
    dot = fp8.dot_general(config.fp8, config.fp8_scaling, **options)
    reasons = fp8.choose(shapes, config.fp8_layers)
    return {name: plain if reason else dot for name, reason in reasons.items()}


def between(model: DecoderConfig, config: StepConfig, mesh: Mesh | None) -> tuple[Between, Between]:
    """Norm and activation: plain ones, and those that cast to FP8.

    With a mesh, on each device's rows; without, for where a device sees no other rows anyway.
    """

    def on_shards(op, **kwargs):
        return op if mesh is None else sharding.rows_on_shards(op, mesh, **kwargs)

    how = {"implementation": config.implementations[1]}
    rms_norm, rms_norm_fp8, swiglu, swiglu_fp8 = (
        functools.partial(op, **how)
        for op in (norm_op.rms_norm, norm_op.rms_norm_fp8, glu_op.swiglu, glu_op.swiglu_fp8)
    )
    norm = functools.partial(nn.rms_norm, **how)
    plain = Between(on_shards(norm), on_shards(nn.gated(model.activation, **how), last="mlp"))
    if config.fp8 != "delayed" or config.fp8_scaling.lhs != "e4m3":
        return plain, plain  # the scale is not known beforehand
    norms = {"plain": on_shards(rms_norm), "fp8": on_shards(rms_norm_fp8)}
    casting = plain._replace(norm=functools.partial(fp8_fused.rms_norm, **norms))
    if model.activation == "silu":
        glus = {"plain": on_shards(swiglu, last="mlp"), "fp8": on_shards(swiglu_fp8, last="mlp")}
        casting = casting._replace(glu=functools.partial(fp8_fused.swiglu, **glus))
    return plain, casting


def loss_options(model: DecoderConfig, config: StepConfig) -> dict[str, Any]:
    """What `losses.ahead_cross_entropy` is told of the loss, wherever it is computed."""
    return {
        "z_loss": config.z_loss,
        "soft_cap": model.logits_soft_cap,
        "implementation": config.implementations[1],
    }


def loss_on_shards(
    model: DecoderConfig, config: StepConfig, mesh: Mesh
) -> Callable[..., losses.LossSums]:
    """`losses.ahead_cross_entropy` of each device's rows and words, summed over the mesh."""
    loss = functools.partial(losses.ahead_cross_entropy, **loss_options(model, config))
    if mesh.size == 1:
        return loss
    words = "tensor" if mesh.shape["tensor"] > 1 else None

    def here(hidden, head, labels):
        head = jax.lax.all_gather(head, sharding.RULES["embed"], axis=1, tiled=True)
        sums = loss(hidden, head, labels, axis_name=words)
        return jax.lax.psum(sums, sharding.TOKEN_AXES)

    rows = sharding.spec(("batch", "sequence"))
    head = sharding.spec(("vocab" if words else None, "embed"))
    specs = PartitionSpec(None, *rows), head, rows
    return jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


def loss_weights(mtp: MtpConfig, step: Int[Array, ""]) -> Float[Array, "N"]:
    """Weights of the decoder's mean loss, 1, and of each head's, the scheduled one / depth."""
    weight = jnp.float32(mtp.weight)
    for start, then in mtp.changes:
        weight = jnp.where(step >= start, jnp.float32(then), weight)
    return jnp.append(jnp.ones(1), jnp.full(mtp.depth, weight / max(mtp.depth, 1)))


def fp8_weights(decoder: Decoder) -> list[Quantized | None]:
    """The kernel of each of `nn.linears`, cast; None for one that is not in FP8."""

    def cast(linear: nn.Linear) -> Quantized | None:
        if not isinstance(dot := linear.dot_general, fp8.DotGeneral):
            return None
        state = None if linear.matmul_state is None else linear.matmul_state.get_value()
        return fp8.quantize_weights(linear.kernel.get_value(), dot, state)

    return [cast(linear) for linear in nn.linears(decoder)]
