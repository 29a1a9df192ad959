"""What a Mosaic GPU kernel does in one way on a GPU and in another in the simulator.

JAX's interpreter of Mosaic GPU kernels (`simulate`) knows shared memory, TMA, barriers and
races. It lacks `pl.run_state`, a matmul whose left factor is in registers, and it does not
check what a wgmma reads for races. The few functions here are written once for the GPU and
once in plain JAX for the interpreter, chosen while tracing; kernels are otherwise the same
program in both. Nothing else in this package may import from `jax._src`.
"""

import contextlib
import inspect
import math
import os
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config as jax_config
from jax._src import dispatch
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir

THREADS = 8  # of XLA's CPU client: 3 to 5 warpgroups, and what runs between them


def interpreting() -> bool:
    """Whether what is traced now runs in the interpreter; part of the key of `jax.jit`."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


@contextlib.contextmanager
def simulate(*, detect_races: bool = True) -> Generator[None]:
    """Runs Mosaic GPU kernels on the CPU, in JAX's interpreter.

    Args:
      detect_races: raise RuntimeError ("RACE DETECTED") where two threads touch the same
        memory unordered.

    Raises:
      RuntimeError: XLA has too few threads on this machine; the message says how to get more.

    Example:
      >>> with simulate():  # doctest: +SKIP
      ...     interpreting()
      True
    """
    # The client's pool of threads; a warpgroup that waits holds one of them.
    threads = max(os.cpu_count() or 1, len(jax.devices("cpu")))
    if threads < THREADS:
        raise RuntimeError(
            f"the simulator would hang: XLA has {threads} threads here and needs {THREADS}; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={THREADS} before JAX starts"
        )
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield
    except Exception:
        # A kernel that failed leaves buffers behind, which fail the next one, and its token,
        # which raises once more at exit.
        dispatch.runtime_tokens.clear()
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise


class Traffic:
    """Bytes that simulated kernels moved by TMA, and how many loads they were."""

    def __init__(self) -> None:
        self.loads = self.stores = self.load_count = 0


@contextlib.contextmanager
def counted_traffic() -> Generator[Traffic]:
    """Counts what TMA moves in the interpreter; for tests of what a kernel reads and writes."""
    traffic = Traffic()
    load, store = gpu_callbacks.AsyncCopyGmemToSmemTask, gpu_callbacks.AsyncCopySmemToGmemTask

    def in_bounds(key: Any, access: Any) -> int:
        """Bytes of a box that lie inside of an array; TMA moves nothing of what is outside."""
        array = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype(key)
        inside = [
            1 if isinstance(r, int) else len(range(*r.indices(n)))
            for r, n in zip(access.range, array.shape, strict=True)
        ]
        return math.prod(inside) * jnp.dtype(array.dtype).itemsize

    lock = threading.Lock()  # each warpgroup is a thread

    class Load(load):
        def __init__(self, **options):
            bytes_ = in_bounds(options["src_allocation_key"], options["src_access"])
            with lock:
                traffic.loads += bytes_
                traffic.load_count += 1
            super().__init__(**options)

    class Store(store):
        def __init__(self, **options):
            bytes_ = in_bounds(options["dst_allocation_key"], options["dst_access"])
            with lock:
                traffic.stores += bytes_
            super().__init__(**options)

    gpu_callbacks.AsyncCopyGmemToSmemTask = Load
    gpu_callbacks.AsyncCopySmemToGmemTask = Store
    try:
        yield traffic
    finally:
        gpu_callbacks.AsyncCopyGmemToSmemTask = load
        gpu_callbacks.AsyncCopySmemToGmemTask = store


def cost(flops: int, *arrays: Any) -> dict[str, Any]:
    """`plgpu.kernel`'s option that states the cost of a call; none before jax 0.12.

    Args:
      flops: of the matmuls.
      arrays: read or written, each once.
    """
    if "cost_estimate" not in inspect.signature(plgpu.kernel).parameters:
        return {}
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return {"cost_estimate": pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0)}


def scoped(body: Callable, *shapes: tuple[int, int]) -> Any:
    """`body(*accumulators)`, float32 and zero at first; nothing is waited for at the end."""
    if interpreting():
        return body(*(_Sum(jnp.zeros(shape, jnp.float32)) for shape in shapes))
    return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def carried(body: Callable, *values: jax.Array) -> tuple[jax.Array, ...]:
    """Makes accumulators of values, calls `body(*accumulators)`, waits for all matmuls in flight.

    Returns:
      The values of the accumulators.
    """
    if interpreting():
        sums = [_Sum(value) for value in values]
        body(*sums)
        return tuple(sum_.value for sum_ in sums)
    sums = pl.run_state(lambda refs: body(*refs))(tuple(map(plgpu.ACC.init, values)))
    return lax.optimization_barrier(sums)


def wgmma(acc: Any, a: Any, b: Any) -> None:
    """Starts `acc += a @ b`.

    Args:
      acc: [m, n], an accumulator of `scoped` or `carried`.
      a: [m, k], in shared memory or in registers.
      b: [k, n], in shared memory; may be transposed (`ref.T`).
    """
    if isinstance(acc, _Sum):
        acc.value += _dot(a, b)
    else:
        plgpu.wgmma(acc, a, b)


def read(acc: Any, *, in_flight: int = 0) -> jax.Array:
    """The value of an accumulator, with the last `in_flight` matmuls not waited for."""
    if isinstance(acc, _Sum):
        return acc.value
    # Without the barrier LLVM is free to move uses of the value ahead of the wait.
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=in_flight))


def matmul(a: Any, b: Any) -> jax.Array:
    """`a @ b` in float32, waited for; factors as of `wgmma`."""

    def body(acc):
        wgmma(acc, a, b)
        return read(acc)

    return scoped(body, (a.shape[0], b.shape[1]))


def accumulate(acc: jax.Array, a: Any, b: Any) -> jax.Array:
    """`acc + a @ b` in float32, waited for; factors as of `wgmma`."""
    (total,) = carried(lambda sum_: wgmma(sum_, a, b), acc)
    return total


def overlap(
    product: tuple[Any, Any],
    sum_: tuple[jax.Array, Any, Any],
    *,
    issued: Callable[[], None],
    meanwhile: Callable,
    state: Any,
) -> tuple[jax.Array, Any]:
    """Two matmuls in flight at once, and work on the first while the second runs.

    Args:
      product: `a`, `b` of the first.
      sum_: `acc`, `a`, `b` of the second.
      issued: called when both are on their way.
      meanwhile: called with (product, state), returns the new state, of the same structure.
      state: arrays in registers.

    Returns:
      `acc + a @ b`, and the new state.
    """
    (a1, b1), (acc, a2, b2) = product, sum_
    if interpreting():
        # Read late what the second matmul reads: memory given up too early is then a race.
        issued()
        state = meanwhile(_dot(a1, b1), state)
        return acc + _dot(a2, b2), state

    def body(refs):
        acc_ref, state_refs = refs

        def issue(product_ref):
            wgmma(product_ref, a1, b1)
            wgmma(acc_ref, a2, b2)
            issued()
            values = jax.tree.map(lambda ref: ref[...], state_refs)
            return meanwhile(read(product_ref, in_flight=1), values)

        values = scoped(issue, (a1.shape[0], b1.shape[1]))
        for ref, value in zip(jax.tree.leaves(state_refs), jax.tree.leaves(values), strict=True):
            ref[...] = value

    return lax.optimization_barrier(pl.run_state(body)((plgpu.ACC.init(acc), state)))


class _Sum:
    """An accumulator of the interpreter."""

    def __init__(self, value: jax.Array):
        self.value = value


def _dot(a: Any, b: Any) -> jax.Array:
    """Reads and multiplies; then shared memory is free for TMA, as after a wgmma.

    A plain read would need this fence before TMA may overwrite what it read; wgmma, which goes
    through the same proxy as TMA, does not.
    """
    product = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()
    return product


def on_device(kinds: tuple[str, ...], *, required: str | None = None) -> jax.Array:
    """Whether the program around is lowered for one of some GPUs; a constant when it runs.

    Only lowering knows this: a program may be compiled here for a GPU that is not here. A
    kernel is a black box to XLA's partitioner, which would gather all of its operands; so the
    answer is no in a program for many devices, except under `jax.shard_map` over all axes.

    Args:
      kinds: what a device kind contains, e.g. ("H100", "H200").
      required: refuse any other device, with this text as the beginning of the message.

    Raises:
      NotImplementedError: while lowering, with `required`.
    """
    return _on_device_p.bind(kinds=kinds, required=required)


_on_device_p = jex_core.Primitive("on_device")
_on_device_p.def_impl(partial(dispatch.apply_primitive, _on_device_p))
_on_device_p.def_abstract_eval(lambda **_: jax.core.ShapedArray((), jnp.bool_))
dispatch.prim_requires_devices_during_lowering.add(_on_device_p)


def _lower_on_device(ctx, *, kinds, required):
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)  # of shard_map
    if mesh is not None:
        whole = set(context.manual_axes) == set(mesh.axis_names)
        devices = tuple(mesh.devices.flat)
    else:
        devices = getattr(context, "device_assignment", None) or ()
        whole = len(devices) == 1
    kind = devices[0].device_kind if devices else "an unknown device"
    found = any(name in kind for name in kinds)
    if required and not (found and whole):
        where = f"{len(devices)} x {kind} (wrap it in jax.shard_map)" if found else kind
        raise NotImplementedError(f"{required}; this program is lowered for {where}")
    return [mlir.ir_constant(np.bool_(found and whole))]


mlir.register_lowering(_on_device_p, _lower_on_device)
