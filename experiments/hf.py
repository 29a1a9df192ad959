"""Released models in Hugging Face's folder format: read to a mesh, and written.

A folder holds `config.json` (`hf_config`), weights (`safetensors`, by the names of `hf_names`) and
a tokenizer. Kernels lie transposed in the files, [out, in], and layers are stacked here.

Tensors go one at a time from the file to their shards, where they are turned and cast: the host
holds one, as it is stored, beside what its own devices have. Weights in FP8 with a scale a block
(`weight_scale_inv`) are multiplied out.
"""

import dataclasses
import difflib
import functools
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from experiments import safetensors
from experiments.errors import UserError
from experiments.hf_config import Description
from experiments.hf_names import HEADS_PREFIX, OUTSIDE, Parameter, abstract, parameters
from experiments.manifest import write_json
from experiments.safetensors import Shape, Stored
from jaxaccel.nn import DecoderConfig, MtpConfig
from jaxaccel.train_step import abstract_decoder, parameter_shardings

BLOCK_SCALE = "_scale_inv"  # of a weight in FP8, after its own name
# In some folders, and of no use: angles that follow from config.json.
DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a folder, found to be those of its model; from `find`."""

    config: DecoderConfig
    mtp: MtpConfig  # heads that the folder has too
    tensors: Mapping[str, Stored]

    @property
    def nbytes(self) -> int:
        """Of the tensors, as they are stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def find(folder: str | Path, config: DecoderConfig, mtp: MtpConfig = MtpConfig()) -> Weights:  # noqa: B008
    """Looks for a decoder's weights; reads headers only.

    Args:
      folder: of the model.
      config: shape of the decoder, from `hf_config.read`.
      mtp: heads that are wanted; a folder without any will do.

    Returns:
      `Weights`, without heads if the folder has none.

    Raises:
      UserError: a file, a tensor, a shape or a type is not as it should be: all that is missing or
        unknown is named, with the nearest name.
    """
    folder = Path(folder).expanduser()
    tensors = safetensors.open_folder(folder)
    if config.layers > len(tensors):  # whatever else: before anything is made for each of them
        raise UserError(
            f"{folder}: config.json has {config.layers:,} layers, and its files {len(tensors):,} "
            "tensors in all"
        )
    has_heads = any(name.startswith(HEADS_PREFIX) for name in tensors)
    mtp = mtp if has_heads else MtpConfig()
    wanted = {name: p for p in parameters(config, mtp) for name in p.names}
    beside = lambda name: (
        DERIVED.fullmatch(name)
        or (name == OUTSIDE["head"] and config.tied_head)
        or (name.startswith(HEADS_PREFIX) and not mtp.depth)
        or name.removesuffix(BLOCK_SCALE) in wanted
    )
    unknown = [name for name in tensors if name not in wanted and not beside(name)]
    missing = [name for name in wanted if name not in tensors]
    if unknown or missing:
        listed = [
            _listed("missing", missing, list(tensors)),
            _listed("unknown", unknown, [*wanted]),
        ]
        raise UserError(
            f"{folder}: its tensors are not those of config.json: {''.join(listed)[2:]}"
        )
    for name, parameter in wanted.items():
        _check(folder, tensors, name, parameter.stored)
    if config.tied_head and OUTSIDE["head"] in tensors:
        _check_tied(folder, tensors[OUTSIDE["embedding"]], tensors[OUTSIDE["head"]])
    used = {n: t for n, t in tensors.items() if n.removesuffix(BLOCK_SCALE) in wanted}
    return Weights(config, mtp, used)


def _listed(what: str, names: list[str], others: list[str], show: int = 4) -> str:
    """Names, and for each the nearest of the others."""
    if not names:
        return ""
    near = lambda name: "".join(f" (near: {n})" for n in difflib.get_close_matches(name, others, 1))
    more = f" and {len(names) - show} more" if len(names) > show else ""
    return f"; {what}: {', '.join(name + near(name) for name in names[:show])}{more}"


def _check(folder: Path, tensors: Mapping[str, Stored], name: str, shape: tuple[int, ...]) -> None:
    tensor, scale = tensors[name], tensors.get(name + BLOCK_SCALE)
    want = list(shape)
    if tensor.shape != shape:
        raise UserError(f"{folder}: {name} is {list(tensor.shape)}; config.json has {want}")
    kind = tensor.dtype.name
    if scale is None:
        if kind not in FLOATS:
            legal = f"{', '.join(FLOATS)}, or float8_e4m3fn with {name}{BLOCK_SCALE} beside it"
            raise UserError(f"{folder}: {name} is {kind}; legal are {legal}")
        return
    if kind != "float8_e4m3fn" or scale.dtype.name not in FLOATS or len(scale.shape) != len(shape):
        raise UserError(
            f"{folder}: {name} is {kind} with a {scale.dtype.name}{list(scale.shape)} scale; "
            f"scales of blocks go with float8_e4m3fn{want}, and have as many dims"
        )
    block = _block(tensor, scale)
    if tuple(-(-n // b) for n, b in zip(shape, block)) != scale.shape:
        raise UserError(
            f"{folder}: {scale.name} is {list(scale.shape)}, which are no equal blocks of {want}"
        )


def _check_tied(folder: Path, embedding: Stored, head: Stored) -> None:
    """Refuses an output head that is stored beside a tied embedding, and is not the same."""
    same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
    rows = max(1, 2**24 // max(1, math.prod(embedding.shape[1:])))
    for start in range(0, embedding.shape[0], rows):
        at = slice(start, start + rows)
        same = same and embedding.read(at).tobytes() == head.read(at).tobytes()
    if not same:
        raise UserError(
            f"{folder}: config.json ties the output head to the embedding, and {head.name} differs "
            "from it: set tie_word_embeddings to false"
        )


def _block(tensor: Stored, scale: Stored) -> tuple[int, ...]:
    """Sides of a block: powers of two, as they are in use."""
    return tuple(
        n if s == 1 else 1 << math.ceil(math.log2(n / s)) if s else 1
        for n, s in zip(tensor.shape, scale.shape)
    )


def load(weights: Weights, mesh: Mesh, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Reads weights to a mesh, each tensor straight to its shards.

    Args:
      weights: from `find`.
      mesh: from `sharding.make_mesh`.
      dtype: of kernels, embedding and head; scales of norms are float32.

    Returns:
      Parameters as `Decoder` has them, a nested dict, sharded as `train_step` has them; without
      an entry `heads` if the folder has none.
    """
    placed = parameter_shardings(abstract_decoder(weights.config, mtp=weights.mtp), mesh)
    tree = abstract(weights.config, weights.mtp)
    order = sorted(
        zip(parameters(weights.config, weights.mtp), jax.tree.leaves(placed)),
        key=lambda pair: pair[0].stacked,  # those that are one tensor first: they are the largest
    )
    made = {
        p.path: _parameter(weights, p, where, jnp.float32 if p.path.endswith(".scale") else dtype)
        for p, where in order
    }
    leaves = [made[p.path] for p in parameters(weights.config, weights.mtp)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _parameter(weights: Weights, p: Parameter, where: NamedSharding, dtype: Any) -> Array:
    spec = (*where.spec, *[None] * (len(p.shape) - len(where.spec)))
    if not p.stacked:
        return _tensor(weights, p.names[0], p.stored, where).astype(dtype)
    one = spec[:0:-1] if p.transposed else spec[1:]
    stack = jnp.zeros(p.shape, dtype, device=where)
    for i, name in enumerate(p.names):
        x = _tensor(weights, name, p.stored, NamedSharding(where.mesh, PartitionSpec(*one)))
        stack = _put(where, p.transposed)(stack, x, i)
        jax.block_until_ready(stack)  # or tensors would pile up on the host
    return stack


@functools.cache
def _put(where: NamedSharding, transposed: bool) -> Any:
    """`(stack, x, i) -> stack` with x at i, in place: it is not copied for each of its layers."""

    def put(stack: Array, x: Array, i: int) -> Array:
        x = (x.T if transposed else x).astype(stack.dtype)
        return jax.lax.dynamic_update_index_in_dim(stack, x, i, 0)

    return jax.jit(put, donate_argnums=0, out_shardings=where)


def _tensor(weights: Weights, name: str, shape: tuple[int, ...], where: NamedSharding) -> Array:
    """One tensor as it is stored, on its devices; each distinct part is read once."""
    parts: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        key = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        if key not in parts:
            parts[key] = read(weights.tensors, name, index[0])[:, *index[1:]]
        return parts[key]

    return jax.make_array_from_callback(shape, where, part)


def read(tensors: Mapping[str, Stored], name: str, rows: slice = slice(None)) -> np.ndarray:
    """Rows of a tensor, as they are stored; FP8 multiplied by the scales of its blocks.

    Args:
      tensors: of a folder.
      name: of one of them.
      rows: of its first dim.

    Returns:
      [rows, ...] of the stored dtype; float32 where that is FP8 or float64.
    """
    tensor, scale = tensors[name], tensors.get(name + BLOCK_SCALE)
    values = tensor.read(rows)
    if scale is None:
        return values.astype(np.float32) if values.dtype == np.float64 else values
    first, last, _ = rows.indices(tensor.shape[0])
    sides = _block(tensor, scale)
    factors = scale.read(slice(first // sides[0], -(-last // sides[0]))).astype(np.float32)
    for dim, side in enumerate(sides):
        factors = np.repeat(factors, side, axis=dim)
    skip = first % sides[0]
    factors = factors[skip : skip + len(values)][:, *(slice(n) for n in values.shape[1:])]
    return values.astype(np.float32) * factors


def save(
    folder: str | Path,
    params: PyTree[Array],
    description: Description,
    *,
    dtype: str = "bfloat16",
    companions: Mapping[str, Path] = {},
) -> None:
    """Writes a model's folder, which `transformers` and `find` read.

    It appears under its name once it is whole.

    Args:
      folder: must not exist, or be empty.
      params: parameters of a decoder, with its heads.
      description: its shape, and the content of its `config.json`.
      dtype: of all tensors: bfloat16, float16 or float32.
      companions: files to copy beside the weights, by name there.

    Raises:
      UserError: the folder is taken or cannot be written, or a value is too large for float16.
    """
    folder, kind = Path(folder).expanduser(), np.dtype(jnp.dtype(dtype))
    check_free(folder)
    found = parameters(description.model, description.mtp)
    leaves = jax.tree.leaves(params)
    of = {n: (p, x, i) for p, x in zip(found, leaves, strict=True) for i, n in enumerate(p.names)}

    def value(name: str) -> np.ndarray:
        parameter, leaf, index = of[name]
        x = np.asarray(leaf[index] if parameter.stacked else leaf)
        with np.errstate(over="ignore"):
            out = (x.T if parameter.transposed else x).astype(kind)
        if dtype == "float16" and not np.isfinite(out).all() and np.isfinite(x).all():
            raise UserError(
                f"{name} holds {np.abs(x).max():.4g}, and float16 ends at 65504: choose bfloat16"
            )
        return out

    shapes = {name: Shape(kind, of[name][0].stored) for name in of}
    folder = folder.resolve()  # through a link
    partial = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        partial.chmod(0o755)
        safetensors.write_folder(partial, shapes, value)
        write_json(partial / "config.json", description.content)
        for name, source in companions.items():
            shutil.copyfile(source, partial / name)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def check_free(folder: str | Path) -> None:
    """Refuses a folder, to be written, that something is in."""
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already, and not empty: choose another")
