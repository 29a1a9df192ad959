"""A tensor part by part: gathered under its own use, or reduced under its own making.

Shared by the collective matmuls. A form says how a device's rows are cut and how parts travel:
`chunked` gathers (or reduces) one part after the other, rings hand blocks to neighbours.
Barriers tie a part's use to the transfer of the next, so that XLA issues the transfer before
the use and waits for it after; without them it would start all transfers at once, combine
them into one, or merge the matmuls that share a weight into one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

FORMS = ("plain", "chunked", "ring", "bidirectional")
RINGS = {"ring": (-1,), "bidirectional": (-1, 1)}  # where parts of a block move along the axis
tie = lax.optimization_barrier


class Form(NamedTuple):
    """How rows are cut and travel, `dim` of a tensor with `ndim` dims along a mesh axis."""

    kind: str  # of FORMS
    parts: int  # that a device's rows are cut in
    axis: str
    devices: int
    dim: int  # not negative
    ndim: int


def parse(form: str) -> tuple[str, int]:
    """Kind and number of parts of a form as users write it.

    Args:
      form: of `FORMS`; `chunked:4` has four parts, `chunked` two.

    Returns:
      Kind, parts.

    Raises:
      ValueError: any other text.

    Example:
      >>> parse("chunked:3"), parse("ring")
      (('chunked', 3), ('ring', 1))
    """
    kind, colon, count = form.partition(":")
    if kind not in FORMS or (
        colon and not (kind == "chunked" and count.isdecimal() and int(count))
    ):
        raise ValueError(f"form is {form!r}; legal: {', '.join(FORMS)}, and chunked:C with C parts")
    return kind, int(count or {"chunked": 2, "bidirectional": 2}.get(kind, 1))


def on_rows(form: Form, function: Callable[[Array], Array], tree: Any) -> Any:
    """Applies a function to the leaves that have the tensor's number of dims; others stay."""
    return jax.tree.map(lambda leaf: function(leaf) if leaf.ndim == form.ndim else leaf, tree)


def _cut(form: Form, x: Array, *sizes: int) -> Array:
    return x.reshape(*x.shape[: form.dim], *sizes, *x.shape[form.dim + 1 :])


def _merge(form: Form, x: Array, dims: int) -> Array:
    """One dim out of several that begin at `dim`."""
    return x.reshape(*x.shape[: form.dim], -1, *x.shape[form.dim + dims :])


def _own(form: Form, tree: Any, part: int) -> Any:
    """A part of a device's own rows."""
    cut = lambda x: lax.index_in_dim(_cut(form, x, form.parts, -1), part, form.dim, False)
    return on_rows(form, cut, tree)


def select(form: Form, tree: Any, part: int, block: Array | None) -> Any:
    """Out of all devices' rows a part's, of one device (`block`) or of all in their order."""

    def take(x):
        x = _cut(form, x, form.devices, form.parts, -1)
        x = x if block is None else lax.dynamic_slice_in_dim(x, block, 1, form.dim)
        return _merge(form, lax.index_in_dim(x, part, form.dim + 1, False), 2)

    return on_rows(form, take, tree)


def gather(form: Form, tree: Any) -> Any:
    """All devices' rows at once."""
    whole = functools.partial(lax.all_gather, axis_name=form.axis, axis=form.dim, tiled=True)
    return on_rows(form, whole, tree)


def scatter(form: Form, x: Array) -> Array:
    """This device's rows of the sum over devices, at once."""
    return lax.psum_scatter(x, form.axis, scatter_dimension=form.dim, tiled=True)


def _shift(form: Form, tree: Any, step: int) -> Any:
    pairs = [(j, (j + step) % form.devices) for j in range(form.devices)]
    return on_rows(form, lambda x: lax.ppermute(x, form.axis, pairs), tree)


def gathered(form: Form, x: Any, use: Callable[..., tuple[Any, Array]]) -> tuple[Any, Array]:
    """Uses all devices' rows part by part as they arrive, each under the next one's transfer.

    Args:
      form: how x travels.
      x: this device's rows: an array, or a tree of which arrays with as many dims travel.
      use: of (carry, rows, part, block), the last two as in `select`; returns the carry and
        what it makes of these rows. The first carry is None.

    Returns:
      The last carry; and what was made, of all devices' rows in their order.
    """
    turns, me = RINGS.get(form.kind, ()), lax.axis_index(form.axis)
    steps = form.devices if turns else form.parts
    arrived, waiting = [_own(form, x, part) for part in range(form.parts)], []
    if not turns:
        arrived, waiting = [gather(form, arrived[0])], arrived[1:]
        if waiting:  # tied, or XLA would combine the gathers into one
            arrived, waiting = tie((arrived, waiting))
    carry, made = None, []
    for step in range(steps):
        coming, now = [], []
        if step < steps - 1:  # a ring's hop, or the next part's gather
            hops = zip(arrived, turns)
            coming = [_shift(form, *hop) for hop in hops] or [gather(form, waiting[0])]
        places = [(part, (me - turn * step) % form.devices) for part, turn in enumerate(turns)]
        places = places or [(step, None)]
        for rows, place in zip(arrived, places):
            carry, out = use(carry, rows, *place)
            now.append(out)
        if coming:
            carry, now, arrived, waiting = tie((carry, now, coming, waiting[1:]))
        made.append(now)
    if turns:
        parts = [_unrolled(form, [now[i] for now in made], turn) for i, turn in enumerate(turns)]
    else:
        parts = [out for (out,) in made]
    cut = [_cut(form, part, form.devices, -1) for part in parts]
    return carry, _merge(form, jnp.stack(cut, axis=form.dim + 1), 3)


def _unrolled(form: Form, blocks: list[Array], turn: int) -> Array:
    """All devices' blocks in their order, from those of this one, of it less `turn`, ..."""
    me = lax.axis_index(form.axis)
    blocks, first = (blocks, me) if turn < 0 else (blocks[::-1], me + 1)
    return _merge(form, jnp.roll(jnp.stack(blocks, axis=form.dim), first, axis=form.dim), 2)


def scattered(form: Form, make: Callable[[Any, int, Array | None], Array], operands: Any) -> Array:
    """This device's rows of the sum over devices of what `make` makes, part by part.

    Args:
      form: how the sums travel.
      make: of (operands, part, block), as in `select`; this device's term of those rows.
      operands: what `make` reads. XLA would merge matmuls that share them; they are tied.

    Returns:
      The sum's rows. A ring adds in the terms' type.
    """
    if form.kind not in RINGS:
        each = reduced(
            form.parts,
            lambda x, part: make(x, part, None),
            operands,
            functools.partial(scatter, form),
        )
        return jnp.concatenate(each, axis=form.dim)
    turns, me = RINGS[form.kind], lax.axis_index(form.axis)
    sums = []
    for step in range(form.devices):
        moved = [_shift(form, total, turn) for total, turn in zip(sums, turns)]
        terms = [
            make(operands, part, (me - turn * (step + 1)) % form.devices)
            for part, turn in enumerate(turns)
        ]
        # The tie keeps the addition out of the matmul, which would then wait for the transfer.
        moved, terms, operands = tie((moved, terms, operands))
        sums = [a + b for a, b in zip(moved, terms)] if step else terms
    return jnp.concatenate(sums, axis=form.dim)


def reduced(
    count: int, make: Callable[[Any, int], Array], operands: Any, reduce: Callable[[Array], Array]
) -> list[Array]:
    """Reduces `make(operands, part)` of each part under the making of the next.

    Args:
      count: parts.
      make: one part's term.
      operands: what it reads, tied as in `scattered`.
      reduce: the collective.

    Returns:
      One array a part.
    """
    term, done = make(operands, 0), []
    for part in range(1, count):
        term, operands = tie((term, operands))
        # Tied again, or XLA would combine the reductions.
        total, term = tie((reduce(term), make(operands, part)))
        done.append(total)
    return [*done, reduce(term)]
