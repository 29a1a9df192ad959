"""What a training run is made of, and which part of it makes it that run and no other."""

import dataclasses
import math
from typing import Any, Literal

import jax

from experiments.data import DataConfig
from experiments.errors import UserError, user_errors
from experiments.hf_names import abstract
from jaxaccel import optim, schedules
from jaxaccel.fp8 import Scaling
from jaxaccel.nn import DecoderConfig, MtpConfig, flops_per_token
from jaxaccel.optim import OptimizerConfig
from jaxaccel.precision import LossScaleConfig
from jaxaccel.step_config import check_batch, check_overlap, check_pipeline
from jaxaccel.train_step import StepConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run. The presets under `experiments/configs` are values of this class."""

    model: DecoderConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    fp8_scaling: Scaling = Scaling()
    mtp: MtpConfig = MtpConfig()

    init_from: str = ""
    """Folder of a released model, Hugging Face's format, to begin with (also --model): its shape,
    its weights, its tokenizer."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that stay as they are, such as embedding or layers.0.*."""
    run_dir: str = ""
    """Folder of the run; empty: runs/CONFIG. Running again with the same folder resumes."""
    steps: int = 1000
    """Optimizer steps in all; may be raised on a finished run."""
    batch: int = 16
    """Rows of a step, over all devices and micro-batches."""
    sequence: int = 256
    """Tokens of a row."""
    micro_batches: int = 1
    """Parts that a batch goes through in, one after the other; saves memory."""
    seed: int = 0
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of activations and matmuls; parameters are float32. auto: bfloat16 on GPU, float32 on CPU."""
    attention: Literal["auto", "xla"] = "auto"
    """auto: Pallas kernels on H100 and H200 in 16 bits, else cuDNN or XLA."""
    kernels: Literal["auto", "xla"] = "auto"
    """Norms, activations and loss likewise; xla: no Pallas kernel in them."""
    fp8: Literal["off", "current", "delayed", "block"] = "off"
    """Matmuls of the layers in FP8, by where the scales come from: this tensor, the last steps'
    (see --fp8-scaling), or tiles of 128. May change when a run is resumed."""
    fp8_layers: str = "*"
    """Which of query, key, value, attention_output, gate, up, down, mtp_projection; comma-separated
    patterns."""
    fp8_strict: bool = False
    """Refuse a device that has no FP8 matmuls, instead of computing the same values by casting."""
    remat: str = "selective"
    """What the backward pass recomputes, from least to most: none, attention, selective, full,
    sqrt; also offload, names:NAME,NAME@host, or auto: the least that fits the budget."""
    budget_gib: float | None = None
    """Memory of one device for --remat auto; without: all of the GPU's."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    z_loss: float = 0.0
    """Weight of the squared log-partition in the loss."""
    mesh: str = ""
    """Devices by axis, say data=2,fsdp=4 (also stage, sequence, tensor); empty: all on fsdp."""
    overlap: str = "none"
    """Collectives to hide behind compute: none, or several of fsdp-prefetch, buckets, sequence,
    collective-matmul, domino, ring-attention, comma-separated."""
    zero: Literal[0, 1] = 0
    """1: optimizer state is cut over the mesh's data axis as well (ZeRO-1)."""
    bucket_mib: float = 30.0
    """With --overlap buckets or fsdp-prefetch: gradients of a layer are joined up to this size."""
    pipeline: schedules.Kind = "1f1b"
    """With a mesh of several stages: in which order they run micro-batches (--micro-batches)."""
    chunks: int = 2
    """With --pipeline interleaved: runs of layers on each stage."""
    delayed_sends: bool = False
    """Of a pipeline: a transfer has a whole tick, and a fill takes twice as long."""
    stage_layers: tuple[int, ...] = ()
    """Of a pipeline: layers of each stage (each run, if interleaved); empty: even."""

    log_every: int = 10
    eval_every: int = 200
    save_every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    eval_batches: int = 16
    """Validation batches of an evaluation."""
    keep: int = 3
    """Checkpoints kept."""
    max_skipped: int = 30
    """Steps with non-finite gradients in a row, after which the run stops."""
    resume: Literal["never", "auto", "must"] = "auto"
    """never: refuse a folder with checkpoints; must: refuse one without."""
    time_limit: float | None = None
    """Minutes after which the run saves and exits with 0."""
    profile: str = ""
    """START:STOP: write a JAX profiler trace of these steps."""
    tensorboard: bool = False
    wandb_project: str | None = None
    sample_prompt: str = "def "
    """What the sample text at the end of the run starts with."""
    dry_run: bool = False
    """Print what would be trained, and exit."""

    coordinator: str = ""
    """HOST:PORT of process 0, where several processes train one model. Not needed under Slurm,
    Open MPI and Kubernetes."""
    processes: int | None = None
    """How many processes; 1: train alone, whatever started this one."""
    process: int | None = None
    """Which of them this is, from 0."""
    join_timeout: float = 5.0
    """Minutes in which all processes must have come together."""
    hang_timeout: float = 15.0
    """Minutes without a finished step after which the run writes all stacks and ends; 0: never.
    The first step, which is compiled, has four times as long."""


# Other words for options: an option cannot be a group of others at once.
ALIASES = {
    "--optimizer": "--optimizer.name",
    "--microbatches": "--micro-batches",
    "--model": "--init-from",
}
# Options that say how a run is carried out or watched, not which numbers it computes:
# they may differ when a run is resumed. FP8 may as well: its state is then made anew.
CARRYING_OUT = frozenset(
    "attention kernels fp8 fp8_layers fp8_strict fp8_scaling run_dir steps micro_batches remat "
    "budget_gib mesh overlap zero bucket_mib pipeline chunks delayed_sends stage_layers "
    "log_every eval_every save_every eval_batches keep max_skipped resume time_limit profile "
    "tensorboard wandb_project sample_prompt dry_run coordinator processes process join_timeout "
    "hang_timeout".split()
)


def check_options(config: TrainConfig, sizes: dict[str, int]) -> None:
    """Refuses numbers that cannot work, saying which could."""
    for field in ("steps", "sequence", "log_every", "eval_every", "save_every", "eval_batches",
                  "micro_batches", "keep", "max_skipped"):  # fmt: skip
        if getattr(config, field) < 1:
            name = field.replace("_", "-")
            raise UserError(f"--{name} is {getattr(config, field)}; it must be at least 1")
    if config.time_limit is not None and not config.time_limit >= 0:
        raise UserError(f"--time-limit is {config.time_limit}; it must be 0 minutes or more")
    if not config.hang_timeout >= 0:
        raise UserError(f"--hang-timeout is {config.hang_timeout}; it must be 0 minutes or more")
    if not 0 <= config.seed < 2**32:  # what every user of the seed takes
        raise UserError(f"--seed is {config.seed}; it must lie in 0 to 2**32 - 1")
    if config.budget_gib is not None and not config.budget_gib > 0:  # nan too
        raise UserError(f"--budget-gib is {config.budget_gib}; it must be above 0")
    if not config.mtp.depth and config.mtp != MtpConfig():
        raise UserError(
            "--mtp options are for heads, and there are none: pass --mtp.depth 1 or more"
        )
    if config.mtp.depth >= config.sequence:
        raise UserError(
            f"--mtp.depth is {config.mtp.depth}; in rows of {config.sequence} tokens it must be at "
            f"most {config.sequence - 1}"
        )
    with user_errors():
        # Of the policies that `auto` chooses from, any will do here.
        chosen = dataclasses.replace(config, remat="full") if config.remat == "auto" else config
        step = step_config(chosen)
        if config.freeze:
            optim.trainable(abstract(config.model, config.mtp), config.freeze)
        check_overlap(config.model, step, sizes)
        check_pipeline(config.model, step, sizes["stage"])
        check_batch(step, sizes, config.batch, config.sequence)


def model_flops(config: TrainConfig) -> float:
    """Model FLOP of one token: `flops_per_token`, without the gradients of weights that stay."""
    total = flops_per_token(config.model, config.sequence, config.mtp)
    if config.freeze:
        params = abstract(config.model, config.mtp)
        trained = jax.tree.leaves(optim.trainable(params, config.freeze))
        leaves = jax.tree_util.tree_leaves_with_path(params)
        head = "embedding" if config.model.tied_head else "head"
        for (path, leaf), yes in zip(leaves, trained):
            times = {"kernel": 1, head: 1 + config.mtp.depth}.get(path[-1].key, 0)
            total -= 0 if yes else 2.0 * times * math.prod(leaf.shape)
    return total


def step_config(config: TrainConfig) -> StepConfig:
    """The part of a run's options that the training step takes; precision resolved."""
    return StepConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(StepConfig)})


def identity(config: TrainConfig) -> dict[str, Any]:
    """What makes a run this run: every option that changes its numbers, by dotted name.

    Example:
      >>> from experiments.configs import load
      >>> identity(load("tiny"))["model.layers"]
      4
    """
    flat: dict[str, Any] = {}

    def walk(prefix, node):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}.", value)
            else:
                flat[prefix + key] = list(value) if isinstance(value, tuple) else value

    tree = dataclasses.asdict(config)
    del tree["data"]["tokenizer"]  # what counts is its fingerprint, not its path
    walk("", {key: value for key, value in tree.items() if key not in CARRYING_OUT})
    return flat
