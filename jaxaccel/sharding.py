"""One place that decides where every array of a run lies.

A mesh has named axes; a model's arrays have named dimensions ("logical axes"); the rules
below say which mesh axes a dimension is cut over. Parameters, optimizer state, batch,
activations and checkpoints all take their sharding from here.

  stage     unlike layers (a pipeline); what is no layer is cut along its width
  data      copies of the model, unlike rows of the batch
  fsdp      unlike rows of the batch, and parameters cut along their width (ZeRO-3)
  sequence  unlike positions of one row, and parameters cut along their width as well
  tensor    heads, MLP and vocabulary cut (Megatron)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from pallas_kernels import manual_axes
from pallas_kernels.attention import Mask

STAGE = "stage"
AXES = (STAGE, "data", "fsdp", "sequence", "tensor")
BATCH_AXES = ("data", "fsdp")
TOKEN_AXES = (*BATCH_AXES, "sequence")  # along these, devices have unlike tokens

Rules = Mapping[str, tuple[str, ...]]

RULES: Rules = {
    "batch": BATCH_AXES,
    "sequence": ("sequence",),
    "layers": (),
    "embed": ("fsdp", "sequence"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}


def state_rules(axes: Sequence[str | None], mesh: Mesh, *, zero: bool = False) -> Rules:
    """Where a parameter lies between steps, or its optimizer state.

    Stages of a pipeline keep their own layers. What is no layer, embedding and output head above
    all, they share: left to the first and the last, it would fill these two alone.

    Args:
      axes: the parameter's logical axes.
      mesh: with every axis of `AXES`.
      zero: cut over `data` as well (ZeRO-1, arXiv:1910.02054, section 5.1), for optimizer state.

    Returns:
      `RULES`, changed so.
    """
    rules = dict(RULES)
    if mesh.shape.get(STAGE, 1) > 1:
        cut = "layers" if "layers" in axes else "embed"
        rules[cut] = (*rules[cut], STAGE)
    if zero:
        rules["embed"] = (*rules["embed"], "data")
    return rules


def parse_mesh(text: str, devices: int) -> dict[str, int]:
    """Reads `data=2,fsdp=4` into sizes for every axis.

    Args:
      text: comma-separated `axis=size`; axes left out have size 1. Empty: all devices
        on `fsdp`, the default that needs the least memory and suits any number.
      devices: how many there are; the sizes must multiply to it.

    Returns:
      Sizes by axis, in the order of `AXES`.

    Raises:
      ValueError: an unknown axis, a size that is no positive integer, or a product that
        is not the number of devices.

    Example:
      >>> parse_mesh("data=2,tensor=4", 8)
      {'stage': 1, 'data': 2, 'fsdp': 1, 'sequence': 1, 'tensor': 4}
    """
    sizes = dict.fromkeys(AXES, 1)
    if not text:
        return sizes | {"fsdp": devices}
    seen = set()
    for part in text.split(","):
        axis, _, size = part.partition("=")
        axis, size = axis.strip(), size.strip()
        if axis not in AXES or axis in seen or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"cannot read {part!r} of mesh {text!r}; write axis=size with each of "
                f"{', '.join(AXES)} at most once, say data=2,fsdp=4"
            )
        seen.add(axis)
        sizes[axis] = int(size)
    product = math.prod(sizes.values())
    if product != devices:
        raise ValueError(f"mesh {text!r} has {product} places, but there are {devices} devices")
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of named axes, whose shardings the compiler fills in (`AxisType.Auto`).

    Args:
      sizes: size by axis, from `parse_mesh`.
      devices: as many as the product of the sizes; all there are by default.

    Returns:
      A `jax.sharding.Mesh`.

    Example:
      >>> make_mesh({"data": 1}, jax.devices()[:1]).axis_names
      ('data',)
    """
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


def spec(axes: Sequence[str | None], rules: Rules = RULES) -> PartitionSpec:
    """Where an array with these logical axes lies.

    Args:
      axes: one name a dimension, None for a dimension that is never cut.
      rules: mesh axes by logical axis.

    Returns:
      A `PartitionSpec`.

    Raises:
      ValueError: a name without a rule, or two dimensions that want one mesh axis.

    Example:
      >>> spec(("embed", "mlp")) == PartitionSpec(("fsdp", "sequence"), "tensor")
      True
    """
    used: dict[str, str] = {}
    parts = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"no rule for logical axis {axis!r}; rules: {', '.join(rules)}")
        places = rules[axis] if axis is not None else ()
        for place in places:
            if place in used:
                raise ValueError(
                    f"logical axes {used[place]!r} and {axis!r} of {tuple(axes)} both want the "
                    f"mesh axis {place!r}; give one of them another rule"
                )
            used[place] = str(axis)
        parts.append(places[0] if len(places) == 1 else places or None)
    return PartitionSpec(*parts)


def sharding(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], rules: Rules = RULES
) -> NamedSharding:
    """`spec` on a mesh, checked against the array's shape.

    Args:
      mesh: the mesh, with every axis that the rules name.
      axes: one logical name a dimension, or None.
      shape: of the array.
      rules: mesh axes by logical axis.

    Returns:
      A `NamedSharding`.

    Raises:
      ValueError: a dimension does not divide by the mesh axes it is cut over.
    """
    if absent := [axis for axis in AXES if axis not in mesh.shape]:
        raise ValueError(
            f"the mesh has axes {', '.join(mesh.shape)} and lacks {', '.join(absent)}: make it "
            "with make_mesh(parse_mesh(...))"
        )
    partition = spec(axes, rules)
    for axis, size, places in zip(axes, shape, partition, strict=True):
        places = (places,) if isinstance(places, str) else places or ()
        parts = 1
        for place in places:
            parts *= mesh.shape[place]
        if size % parts:
            raise ValueError(
                f"dimension {axis!r} of {size} does not divide by {parts}, the size of mesh "
                f"{'x'.join(places)}; legal sizes are multiples of {parts}"
            )
    return NamedSharding(mesh, partition)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a [batch, positions, ...] array: rows over `data` and `fsdp`, positions over `sequence`.

    Args:
      mesh: with these axes.

    Returns:
      A `NamedSharding` for any number of dimensions from two up.
    """
    return NamedSharding(mesh, spec(("batch", "sequence")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Of an array that every device holds whole.

    Args:
      mesh: whose devices those are.

    Returns:
      A `NamedSharding` for any number of dimensions.
    """
    return NamedSharding(mesh, PartitionSpec())


def constrainer(mesh: Mesh, rules: Rules = RULES) -> Callable[[Array, Sequence[str | None]], Array]:
    """What places activations on a mesh, for a model to call without knowing the mesh.

    Args:
      mesh: where to; of one device, the result does nothing.
      rules: mesh axes by logical axis.

    Returns:
      A function `(x, logical axes) -> x`, to be called under `jax.jit`.
    """
    if mesh.size == 1:
        return lambda x, axes: x
    return lambda x, axes: jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, spec(axes, rules))
    )


def attention_on_shards(attention: Callable, mesh: Mesh, kv_heads: int) -> Callable:
    """Attention that each device computes for its own rows and heads.

    Left to XLA's partitioner, a Pallas kernel is a black box whose operands it would gather.

    Args:
      attention: `(q [B, T, H, D], k, v [B, T, K, D], mask=, **options) -> [B, T, H, D]`, with a
        mask of `pallas_kernels.attention` that has no offset of its own.
      mesh: with every axis of `AXES`. Along `sequence` keys and values are gathered.
      kv_heads: K. If it does not divide by `tensor`, the partitioner has to do.

    Returns:
      The same function, for arrays on `mesh` under `jax.jit`.
    """
    if mesh.size == 1 or kv_heads % mesh.shape["tensor"]:
        return attention
    queries, keys = spec(("batch", "sequence", "heads", None)), spec(("batch", None, "heads", None))

    def attend(q: Array, k: Array, v: Array, *, mask: Mask, **options: float) -> Array:
        def here(q, k, v, q_segments, k_segments):
            here = dataclasses.replace(mask, q_segments=q_segments, k_segments=k_segments)
            if mesh.shape["sequence"] > 1:  # the first query's place among all keys
                place = jax.lax.axis_index("sequence") * q.shape[1]
                here = dataclasses.replace(here, offset=place)
            return attention(q, k, v, mask=here, **options)

        specs = queries, keys, keys, spec(("batch", "sequence")), spec(("batch",))
        run = jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=queries)
        return run(q, k, v, mask.q_segments, mask.k_segments)

    return attend


def rows_on_shards(op: Callable, mesh: Mesh, last: str | None = None) -> Callable:
    """An op on the last dim of [B, T, D] arrays that each device computes for its own rows.

    For Pallas kernels, as `attention_on_shards`.

    Args:
      op: of such arrays, of others that every device has whole, and of options. Results are
        [B, T, D], or a scalar: a maximum, which becomes that of all devices.
      mesh: with `data`, `fsdp` and `tensor`.
      last: logical axis of D.

    Returns:
      The same function, for arrays on `mesh` under `jax.jit`. Given arrays of more dims, as a
      norm of heads is, it leaves them to the partitioner.
    """

    def maximum(y: Array) -> Array:
        axes = tuple(manual_axes.varying(y))
        return jax.lax.pmax(jax.lax.stop_gradient(y), axes) if axes and not y.ndim else y

    def apply(*args, **options):
        leaves, tree = jax.tree.flatten((args, options))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        if mesh.size == 1 or any(x.ndim > 3 for x in arrays.values()):
            return op(*args, **options)

        def here(arrays):
            args, options = tree.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            return op(*args, **options)

        place = lambda x: spec(("batch", "sequence", last)) if x.ndim == 3 else PartitionSpec()
        return jax.shard_map(
            lambda arrays: jax.tree.map(maximum, here(arrays)),
            mesh=mesh,
            in_specs=(jax.tree.map(place, arrays),),
            out_specs=jax.tree.map(place, jax.eval_shape(here, arrays)),
        )(arrays)

    return apply


def like_parameters(
    state: PyTree, parameters: PyTree, placed: PyTree[NamedSharding], mesh: Mesh
) -> PyTree[NamedSharding]:
    """Shardings for optimizer state: moments lie like their parameter, the rest is whole.

    A moment may consist of several arrays: one of the parameter's shape, and others beside it. Of
    these, what is shaped like the parameter but for the last dimension (scales of blocks along it)
    is cut like it as far as that dimension divides.

    Args:
      state: abstract optimizer state, whose subtrees with the structure of `parameters` and
        arrays of their shapes are moments; masked parameters may be missing.
      parameters: abstract parameters.
      placed: a sharding for each parameter.
      mesh: where everything else is replicated.

    Returns:
      A tree like `state` with a sharding at each leaf.
    """
    structure, whole = jax.tree.structure(parameters), replicated(mesh)
    shapes = [x.shape for x in jax.tree.leaves(parameters)]

    def moments(node: PyTree) -> list[PyTree] | None:
        """What `node` holds for each parameter; None if it is no tree of moments."""
        try:
            parts = structure.flatten_up_to(node)
        except ValueError:
            return None
        first = [jax.tree.leaves(part)[:1] for part in parts]
        fits = all(x.shape == shape for found, shape in zip(first, shapes) for x in found)
        return parts if fits and any(first) else None

    def place(node: PyTree) -> PyTree[NamedSharding]:
        if (parts := moments(node)) is None:
            return whole
        beside = [
            jax.tree.map(lambda x, shape=shape, where=where: _beside(x, shape, where), part)
            for part, shape, where in zip(parts, shapes, jax.tree.leaves(placed))
        ]
        return structure.unflatten(beside)

    return jax.tree.map(place, state, is_leaf=lambda node: moments(node) is not None)


def _beside(x: Any, shape: tuple[int, ...], where: NamedSharding) -> NamedSharding:
    """Where an array that belongs to a parameter of this shape lies."""
    if x.shape == shape:
        return where
    if not shape or x.ndim != len(shape) or x.shape[:-1] != shape[:-1]:
        return NamedSharding(where.mesh, PartitionSpec())
    spec = (*where.spec, *[None] * (len(shape) - len(where.spec)))
    axes = (spec[-1],) if isinstance(spec[-1], str) else spec[-1] or ()
    divides = x.shape[-1] % math.prod(where.mesh.shape[axis] for axis in axes) == 0
    return NamedSharding(where.mesh, PartitionSpec(*spec[:-1], spec[-1] if divides else None))
