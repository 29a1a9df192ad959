"""The techniques composed into one training step, in one stated order.

`make_train_step` is where a configuration becomes values: which matmul, which loop over
layers, which dtypes, which sharding. No technique knows another; all of them meet here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from jaxaccel import (
    accumulate,
    explicit,
    fp8,
    losses,
    nn,
    optim,
    overlap,
    precision,
    remat,
    sharding,
    stages,
    step_config,
)
from jaxaccel.fp8 import DelayedState
from jaxaccel.nn import Decoder, DecoderConfig, Placement
from jaxaccel.precision import LossScale
from jaxaccel.step_config import StepConfig
from pallas_kernels.attention import attention

Batch = dict[str, Any]  # int32 [B, T] arrays, or their shapes
BATCH_KEYS = ("tokens", "labels", "segments", "positions")


@jax.tree_util.register_dataclass
@no_type_check  # JAX rebuilds it around shapes and shardings too
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run is between two steps, besides its place in the data."""

    step: Int[Array, ""]  # int32: batches seen, skipped ones included
    params: PyTree[Array]  # nested dict of float32
    opt_state: PyTree[Array]
    loss_scale: LossScale
    skipped: Int[Array, ""]  # int32: steps whose gradients were not finite, in all
    skipped_in_row: Int[Array, ""]  # int32: and up to now without a finite one between
    key: Array  # uint32 key data, for whatever draws at random
    fp8: PyTree[DelayedState]  # by layer and matmul; empty but for delayed scaling


class StepMetrics(NamedTuple):
    """Scalars of one step, float32 and int32, on device."""

    loss: Float[Array, ""]  # mean nll of the batch's counted tokens, nats
    grad_norm: Float[Array, ""]  # global, before clipping
    tokens: Int[Array, ""]  # counted tokens
    loss_scale: Float[Array, ""]  # the one this step used
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]
    fp8_skipped: Float[Array, ""]  # non-finite magnitudes that delayed scaling left out, in all
    mtp_losses: Float[Array, "depth"]  # mean nll of each head's counted tokens, nats


class TrainStep(NamedTuple):
    """What `make_train_step` makes; every function is jitted once."""

    # (key, parameters = {}) -> state: drawn from a PRNG key but for the parameters given, whole
    # entries of the nested dict, which are donated.
    init: Callable[..., TrainState]
    step: jax.stages.Wrapped  # (state, batch) -> (state, StepMetrics); donates the state
    warm_up: jax.stages.Wrapped  # (state, batch) -> state with FP8 scales; donates the state
    evaluate: Callable[[PyTree, Batch], losses.LossSums]  # from params; never in FP8
    abstract_state: TrainState  # ShapeDtypeStructs with shardings
    batch_sharding: NamedSharding
    # Host arrays to devices: all rows, or this process' where each has a share of them.
    place: Callable[[Mapping[str, Any]], Batch]
    compiler_options: dict[str, Any]  # of XLA's, that `step` is compiled with


def abstract_decoder(config: DecoderConfig, **arguments: Any) -> Decoder:
    """A decoder whose parameters are shapes only; nothing is allocated.

    Args:
      config: shape of the decoder.
      arguments: as `Decoder` takes them, but for `rngs`.

    Returns:
      A `Decoder` of `jax.ShapeDtypeStruct`s.
    """
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **arguments))


def parameter_shardings(model: Decoder, mesh: Mesh, *, zero: bool = False) -> PyTree[NamedSharding]:
    """A sharding for each parameter, from its logical axes.

    Args:
      model: a decoder, abstract or not.
      mesh: from `sharding.make_mesh`.
      zero: for their optimizer state under ZeRO-1.

    Returns:
      A nested dict, shaped like the parameters.

    Raises:
      ValueError: a dimension does not divide by the mesh axis it is cut over; names the
        parameter and the legal sizes.
    """

    def place(path, parameter):
        try:
            axes = parameter.get_metadata("axes")
            rules = sharding.state_rules(axes, mesh, zero=zero)
            return sharding.sharding(mesh, axes, parameter.shape, rules)
        except ValueError as error:
            raise ValueError(f"parameter {jax.tree_util.keystr(path)}: {error}") from None

    is_parameter = lambda node: isinstance(node, nnx.Variable)
    placed = jax.tree_util.tree_map_with_path(place, nnx.state(model), is_leaf=is_parameter)
    return nnx.to_pure_dict(placed)


def abstract_batch(step: TrainStep, rows: int, sequence: int) -> Batch:
    """Shapes of a batch, to compile `step.step` with `step.abstract_state` for.

    Args:
      step: from `make_train_step`.
      rows: of the whole batch.
      sequence: tokens of a row.

    Returns:
      A `jax.ShapeDtypeStruct` with its sharding for each of `BATCH_KEYS`.
    """
    shape = jax.ShapeDtypeStruct((rows, sequence), jnp.int32, sharding=step.batch_sharding)
    return dict.fromkeys(BATCH_KEYS, shape)


def make_train_step(
    model: DecoderConfig, optimizer: optax.GradientTransformation, config: StepConfig, mesh: Mesh
) -> TrainStep:
    """Composes model, optimizer and techniques into a training step on `mesh`.

    Args:
      model: shape of the decoder.
      optimizer: any optax transformation; it sees clipped float32 gradients.
      config: precision, rematerialisation, accumulation, clipping, loss.
      mesh: from `sharding.make_mesh`.

    Returns:
      `TrainStep`. Its batch is a dict of int32 [B, T] arrays: `tokens`, `labels` (-1 is
      ignored), `segments` (0 is padding) and `positions`. B must divide by the devices of
      the mesh's `data` and `fsdp` axes times `config.micro_batches`.

    Raises:
      ValueError: a dimension of the model does not divide by the mesh axis it is cut over.
    """
    # 1. Mesh and shardings, from an abstract model: nothing is allocated yet.
    dtype = precision.COMPUTE_DTYPES[config.precision]
    attend = functools.partial(attention, implementation=config.implementations[0])
    between, casting = step_config.between(model, config, mesh)
    plain = functools.partial(
        Decoder,
        model,
        mtp=config.mtp,
        dtype=dtype,
        # 2. The model's arguments: the loop over layers decides what is recomputed, activations
        #    are placed on the mesh, each device attends with its own heads and norms its own
        #    rows, and the layers' matmuls are plain or FP8. Scales that are not known yet are
        #    found once, by `warm_up`; a step relies on them, and casts where the values are made.
        attention=sharding.attention_on_shards(attend, mesh, model.kv_heads),
        between=between,
        scan=functools.partial(remat.scan, policy=config.remat),
        placement=Placement(sharding.constrainer(mesh)),
    )
    matmuls = functools.partial(step_config.matmuls, model, config, devices=mesh.size)
    dots = matmuls(warm_start=False)
    build = functools.partial(plain, dot_general=dots, between=casting)
    build_cold = functools.partial(plain, dot_general=matmuls(warm_start=True))
    split = lambda build: nnx.split(
        jax.eval_shape(lambda: build(rngs=nnx.Rngs(0))), nnx.Param, nn.NextValue
    )
    abstract = jax.eval_shape(lambda: plain(rngs=nnx.Rngs(0)))
    graphdef, abstract_params = nnx.split(abstract)
    abstract_params = nnx.to_pure_dict(abstract_params)
    params_sharding = parameter_shardings(abstract, mesh)
    whole = sharding.replicated(mesh)
    rows = sharding.batch_sharding(mesh)

    # Parameters that stay have no gradient, no part in the norm and no optimizer state.
    trained = optim.trainable(abstract_params, config.freeze)
    if config.freeze:
        optimizer = optax.masked(optimizer, trained)

    def init(key: Array, given: PyTree = {}) -> TrainState:  # noqa: B006 (never changed)
        params_key, key = jax.random.split(key)
        decoder = build(rngs=nnx.Rngs(params=params_key))
        _, params, matmul_state = nnx.split(decoder, nnx.Param, nn.NextValue)
        params = nnx.to_pure_dict(params) | given
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            loss_scale=precision.init_loss_scale(config.precision, config.loss_scale),
            skipped=jnp.int32(0),
            skipped_in_row=jnp.int32(0),
            key=jax.random.key_data(key),
            fp8=nnx.to_pure_dict(matmul_state),
        )

    # 3. The loss, a sum over tokens for each prediction: the next token's, and those of the
    #    heads that predict further ahead. Dividing by a count is left to whoever knows the count
    #    of the whole batch.
    cross_entropy = step_config.loss_on_shards(model, config, mesh)
    inputs = lambda batch: {f"{key}_BT": batch[key] for key in ("segments", "positions")}

    def look_ahead(batch: Batch) -> Batch:  # labels of every prediction
        labels = losses.ahead_labels(batch["labels"], batch["segments"], config.mtp.depth)
        return {key: batch[key] for key in BATCH_KEYS} | {"labels": labels}

    def loss_sums(decoder: Decoder, batch: Batch) -> losses.LossSums:
        hidden = decoder.ahead(batch["tokens"], **inputs(batch))
        return cross_entropy(hidden, decoder.head_VD, batch["labels"])

    # 4. Gradients over micro-batches. Each is divided by the token counts of the whole batch,
    #    so their sum is the large batch's gradient, ragged or not. Weights are cast to FP8 once
    #    for all of them; FP8 state, whose gradient is its next value, merges by maximum.
    def partitioned(build, params, fp8_state, batch: Batch, weights: Array):
        graphdef, kernels = split(build)[0], []
        if config.micro_batches > 1:
            kernels = step_config.fp8_weights(nnx.merge(graphdef, params, fp8_state))

        def objective(params, fp8_state, part: Batch):
            decoder = nnx.merge(graphdef, params, fp8_state)
            for linear, kernel in zip(nn.linears(decoder), kernels):
                linear.prepared = None if kernel is None else nn.Prepared(kernel)
            sums = loss_sums(decoder, part)
            return (sums.objective * weights).sum(), sums.nll

        def gradient(part: Batch):
            with_value = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
            (_, nll), (grads, fp8_next) = with_value(params, fp8_state, part)
            return (nll, grads), fp8_next

        return accumulate.accumulate(gradient, batch, config.micro_batches, step_config.merge)

    def gradients(take, state: TrainState, batch: Batch, counts: Array):
        weights = step_config.loss_weights(config.mtp, state.step) / counts * state.loss_scale.scale
        sums, fp8_next = take(state.params, state.fp8, batch, weights)
        return sums, fp8.settle(state.fp8, fp8_next)

    def count_tokens(batch: Batch) -> tuple[Array, Array]:  # int32 [], and float32 [N]
        step_config.check_batch(config, mesh.shape, *batch["tokens"].shape)
        tokens = jnp.sum(batch["labels"] != losses.IGNORED, axis=(0, 1), dtype=jnp.int32)
        return tokens[0], jnp.maximum(tokens, 1).astype(jnp.float32)

    def scored(params, batch: Batch) -> losses.LossSums:
        decoder = nnx.merge(graphdef, params)
        hidden = decoder(batch["tokens"], **inputs(batch))[None]
        sums = cross_entropy(hidden, decoder.head_VD, batch["labels"][..., None])
        return jax.tree.map(lambda x: x[0], sums)

    take, evaluate = functools.partial(partitioned, build), scored
    ordered = overlap.in_order(mesh.devices.flat[0].platform) if mesh.size > 1 else {}
    options = ordered
    cold = functools.partial(partitioned, build_cold)
    step_config.check_overlap(model, config, mesh.shape)
    step_config.check_pipeline(model, config, mesh.shape["stage"])
    if mesh.shape["stage"] > 1:
        pipelined = functools.partial(stages.make_gradients, model, config, mesh, params_sharding)
        take, cold = pipelined(dots), pipelined(matmuls(warm_start=True))
        evaluate = stages.make_evaluate(model, config, mesh, params_sharding)
    elif config.techniques:
        if config.prefetched:
            options = ordered | overlap.compiler_options(
                step_config.layer_bytes(abstract_params, dtype), int(config.bucket_mib * 2**20)
            )
        take = explicit.make_gradients(model, config, mesh, params_sharding, dots)

    def warm_up(state: TrainState, batch: Batch) -> TrainState:
        batch = look_ahead(batch)
        _, fp8_state = gradients(cold, state, batch, count_tokens(batch)[1])
        return dataclasses.replace(state, fp8=fp8_state)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        batch = look_ahead(batch)
        tokens, counts = count_tokens(batch)
        (nll, grads), fp8_state = gradients(take, state, batch, counts)
        grads = jax.tree.map(lambda g, t: g if t else jnp.zeros_like(g), grads, trained)
        mean = nll / counts
        scale = state.loss_scale.scale

        # 5. Once a batch: check, unscale in float32 and clip. The norm is finite only if every
        #    gradient is: one reduction serves as check, metric and clip. The scale is a power
        #    of two, so that it can be divided out of the norm and of the clipping factor.
        norm = optax.tree.norm(grads) / scale
        finite = jnp.isfinite(norm) & jnp.isfinite(nll).all()
        factor = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-12)) / scale
        grads = jax.tree.map(lambda g: g * factor, grads)

        # 6. The optimizer, and a choice: with a non-finite gradient parameters and
        #    optimizer state stay bit for bit what they were. A branch and not a select:
        #    XLA then updates the donated moments in place, without copying them first.
        def update(params, opt_state):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = jax.lax.cond(
            finite, update, lambda *old: old, state.params, state.opt_state
        )
        scaling = config.precision == "float16"
        skipped = state.skipped + (~finite).astype(jnp.int32)
        in_row = jnp.where(finite, 0, state.skipped_in_row + 1)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            loss_scale=precision.update_loss_scale(state.loss_scale, finite, config.loss_scale)
            if scaling
            else state.loss_scale,
            skipped=skipped,
            skipped_in_row=in_row,
            key=state.key,
            fp8=fp8_state,
        )
        fp8_skipped = fp8.skipped(fp8_state)
        figures = (norm, tokens, scale, skipped, in_row, fp8_skipped)
        return new, StepMetrics(mean[0], *figures, mean[1:])

    # 7. The sharding of the state: moments lie like their parameters, or in smaller pieces of
    #    them (ZeRO-1), scalars everywhere.
    moments = parameter_shardings(abstract, mesh, zero=bool(config.zero))
    shapes = jax.eval_shape(init, jax.random.key(0))
    state_sharding = jax.tree.map(lambda _: whole, shapes)
    state_sharding = dataclasses.replace(
        state_sharding,
        params=params_sharding,
        opt_state=sharding.like_parameters(shapes.opt_state, abstract_params, moments, mesh),
    )
    place = lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where)
    return TrainStep(
        init=jax.jit(init, out_shardings=state_sharding, donate_argnums=1),
        step=jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(state_sharding, rows),
            out_shardings=(state_sharding, whole),
            compiler_options=options,
        ),
        warm_up=jax.jit(
            warm_up,
            donate_argnums=0,
            in_shardings=(state_sharding, rows),
            out_shardings=state_sharding,
            compiler_options=ordered,
        ),
        evaluate=jax.jit(
            evaluate,
            in_shardings=(params_sharding, rows),
            out_shardings=whole,
            compiler_options=ordered,
        ),
        abstract_state=jax.tree.map(place, shapes, state_sharding),
        batch_sharding=rows,
        place=lambda batch: {
            key: jax.make_array_from_process_local_data(rows, batch[key]) for key in BATCH_KEYS
        },
        compiler_options=options,
    )
