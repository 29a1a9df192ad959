"""Weights in safetensors files, read and written one tensor at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
place of each tensor), and the tensors' bytes. A folder holds one file, or several and an index.
Headers come from strangers: everything in one is checked against the size of the file before
memory is taken for it. Nothing is mapped into memory: mapped pages count as the process' own.

The format: https://github.com/huggingface/safetensors
"""

import contextlib
import dataclasses
import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from experiments.errors import UserError
from experiments.manifest import sync, write_json

_KINDS = {
    "BOOL": np.bool_, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip
_DTYPES: dict[str, np.dtype] = {name: np.dtype(kind) for name, kind in _KINDS.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_DIMS = 64  # NumPy's
_MAX_INT = 2**63 - 1

# What a file says is shown cut short: it may be of any length, or nested.
_short = reprlib.Repr(maxstring=120, maxlong=40, maxlist=8, maxdict=4, maxlevel=2).repr


class Shape(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    path: Path
    start: int  # byte of the file where it begins

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Shape(self.dtype, self.shape).nbytes

    def read(self, rows: slice = slice(None)) -> np.ndarray:
        """The tensor, or some of its rows, in a new array; only those bytes are read.

        Args:
          rows: of the first dim, with step 1; bounds as in NumPy.

        Returns:
          [rows, *shape[1:]] of `dtype`; of no dims where the tensor has none.

        Raises:
          UserError: the file cannot be read, or has been cut since its header was.
        """
        shape, start = self.shape, self.start
        if shape:
            low, high, step = rows.indices(shape[0])
            if step != 1:
                raise ValueError(f"rows of {self.name}: got {rows}, the step must be 1")
            start += low * Shape(self.dtype, shape[1:]).nbytes
            shape = (max(high - low, 0), *shape[1:])
        elif rows != slice(None):
            raise ValueError(f"rows of {self.name}: got {rows}, but it has no dims")
        array = np.empty(shape, self.dtype)
        view, done = memoryview(array.reshape(-1).view(np.uint8)), 0
        with _failing(f"cannot read {self.path}"), open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            # One call, unless the system gives less at a time (Linux: 2 GiB).
            while done < len(view) and (count := file.readinto(view[done:])):
                done += count
        if done < len(view):
            expected = f"{self.name} needs {start + len(view):,}"
            raise UserError(f"{self.path} is cut short: {start + done:,} bytes, {expected}")
        return array


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, by name, as its header lists them; reads nothing else.

    Args:
      path: a safetensors file.

    Raises:
      UserError: the file cannot be read, is no safetensors file, is cut short, or its header
        is not what the format allows.
    """
    with _failing(f"cannot read {path}"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = 8 + _header_length(path, file.read(8), size)
        header = _parse(path, file.read(start - 8))
    metadata = header.pop("__metadata__", {})
    if not _is_str_to_str(metadata):
        raise UserError(f"{path}: __metadata__ is {_short(metadata)}; it must map text to text")
    stored = {}
    for name, entry in header.items():
        tensor, begin = _entry(f"{path}: tensor {_short(name)}", entry)
        stored[name] = Stored(name, *tensor, path, start + begin)
    _check_places(path, [*stored.values()], start, size)
    return stored


def open_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a model's folder, by name; reads headers only.

    They lie in `model.safetensors`, or, where there is no such file, in those that
    `model.safetensors.index.json` names.

    Args:
      folder: a folder as `save_pretrained` of `transformers` writes it.

    Raises:
      UserError: neither file is there, a shard is missing, holds too little or too much, or
        is bad (see `read_header`).
    """
    with _failing(f"cannot read {folder}"):
        if (folder / _SINGLE).is_file():
            return read_header(folder / _SINGLE)
        where = _weight_map(folder)
    files = {file: read_header(folder / file) for file in sorted(set(where.values()))}
    promised = set(where.items())
    found = {(name, file) for file, tensors in files.items() for name in tensors}
    wrong = [
        f"{file} {'lacks' if (name, file) in promised else 'also holds'} {_short(name)}"
        for name, file in sorted(promised ^ found)
    ]
    if wrong:
        raise UserError(f"{folder}: its files are not as {_INDEX} says: {_some(wrong)}")
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def write(
    path: Path,
    tensors: Mapping[str, Shape],
    values: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] = {},
) -> None:
    """Writes one file, which appears under its name once it is whole and on disk.

    Wide dtypes come first, so that each tensor is aligned to its own; otherwise the order of
    `tensors` is kept.

    Args:
      path: the file; its folder exists.
      tensors: dtype and shape by name, all known before the first value is asked for.
      values: the tensor of a name; called once each, in the order of the file, and only one is
        held at a time.
      metadata: any text, by name.

    Raises:
      UserError: the file cannot be written, or a dtype is not one of the format's.
      ValueError: a value is not what `tensors` promised.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header = _header({name: tensors[name] for name in order}, metadata)
    temporary = path.with_name(path.name + ".tmp")
    with _failing(f"cannot write {path}"):
        try:
            with open(temporary, "wb") as file:
                file.write(header)
                for name in order:
                    file.write(_bytes(name, values(name), tensors[name]))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def write_folder(
    folder: Path,
    tensors: Mapping[str, Shape],
    values: Callable[[str], np.ndarray],
    limit: int = 5 * 2**30,
) -> None:
    """Writes a model's weights as `transformers` does: one file, or several and then an index.

    Args:
      folder: made if need be; holds no weights yet.
      tensors: dtype and shape by name, in the order in which files are filled.
      values: the tensor of a name, as in `write`.
      limit: bytes of tensors in a file; a larger tensor has a file of its own.

    Raises:
      UserError: the folder holds weights already, or what `write` raises.
    """
    there = sorted(path.name for path in folder.glob("*.safetensors*"))
    if there:
        raise UserError(f"{folder} holds weights already: {_some(there)}; give an empty folder")
    with _failing(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, limit)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        part = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = part if shards[1:] else _SINGLE
        # Without this format `transformers` refuses to load the file.
        write(folder / file, {name: tensors[name] for name in names}, values, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    if shards[1:]:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        with _failing(f"cannot write {folder / _INDEX}"):
            write_json(folder / _INDEX, index)


@contextlib.contextmanager
def _failing(what: str) -> Generator[None]:
    """Turns what the system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


def _header_length(path: Path, head: bytes, size: int) -> int:
    if head == b"version ":
        raise UserError(f"{path} is not the weights but Git LFS' pointer to them: git lfs pull")
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > _MAX_HEADER:
        got = f"a header of {length:,} bytes" if len(head) == 8 else f"{size} bytes in all"
        legal = f"begin with a header's length in 8 bytes, at most {_MAX_HEADER:,}"
        raise UserError(f"{path} is no safetensors file, which must {legal}: got {got}")
    if length > size - 8:
        header = f"its header is to end at {8 + length:,}"
        raise UserError(f"{path} is cut short: it holds {size:,} bytes, {header}")
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object from a stranger."""
    if not raw.startswith(b"{"):
        raise UserError(f"{path}: JSON must begin with '{{', got {raw[:8]!r}")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise UserError(f"{path}: JSON nested too deeply; tensors need three levels") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{_short(twice)} is there twice")
    return found


def _is_str_to_str(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_sizes(value: Any) -> bool:
    """A list of integers that a size can be; JSON's booleans are none."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i <= _MAX_INT for i in value)


def _entry(where: str, entry: Any) -> tuple[Shape, int]:
    """What a tensor is, and where in the data it begins."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} is {_short(entry)}; it must be dtype, shape and data_offsets")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in _DTYPES:
        raise UserError(f"{where}: dtype {_short(name)}; known are {', '.join(_DTYPES)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        legal = f"at most {_MAX_DIMS} integers from 0 to 2^63 - 1"
        raise UserError(f"{where}: shape {_short(shape)}; it must be a list of {legal}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        legal = "two integers, begin and end, 0 <= begin <= end < 2^63"
        raise UserError(f"{where}: data_offsets {_short(offsets)}; they must be {legal}")
    tensor, (begin, end) = Shape(_DTYPES[name], tuple(shape)), offsets
    # NumPy refuses [2**62, 0] of 4 bytes as well: in an empty one the other dims count.
    if tensor._replace(shape=tuple(filter(None, shape))).nbytes > _MAX_INT:
        raise UserError(f"{where}: shape {_short(shape)} of {name} is more than 2^63 - 1 bytes")
    if end - begin != tensor.nbytes:
        takes = f"shape {_short(shape)} of {name} takes {tensor.nbytes:,} bytes"
        raise UserError(f"{where}: {takes}, data_offsets {offsets} hold {end - begin:,}")
    return tensor, begin


def _check_places(path: Path, tensors: list[Stored], start: int, size: int) -> None:
    """Whether they fill the file from byte `start` to its end, `size`."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != start:
            where = f"begins at byte {tensor.start:,}, the one before ends at {start:,}"
            legal = "no gaps and no overlaps are legal"
            raise UserError(f"{path}: tensor {_short(tensor.name)} {where}; {legal}")
        start += tensor.nbytes
    if start != size:
        kind = "cut short" if start > size else "too long"
        raise UserError(f"{path} is {kind}: it holds {size:,} bytes, its header promises {start:,}")


def _weight_map(folder: Path) -> dict[str, str]:
    """File by tensor, as the index has it: files that are there, in the folder itself."""
    index = folder / _INDEX
    if not index.is_file():
        raise UserError(_no_weights(folder))
    size = index.stat().st_size
    if size > _MAX_HEADER:
        raise UserError(f"{index}: {size:,} bytes; legal are {_MAX_HEADER:,}")
    where = _parse(index, index.read_bytes().strip()).get("weight_map")
    if not where or not _is_str_to_str(where):
        raise UserError(f"{index}: weight_map is {_short(where)}; it must name a file per tensor")
    files = sorted(set(where.values()))
    for file in files:
        if file in ("", ".", "..") or {*"/\\"} & {*file} or not file.isprintable():
            legal = "only files in its own folder are read"
            raise UserError(f"{index}: weight_map names {_short(file)}; {legal}")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise UserError(f"{folder}: missing files, which {_INDEX} names: {_some(missing)}")
    return where


def _no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    neither = f"{folder} holds neither {_SINGLE} nor {_INDEX}"
    others = [name for name in names if name.endswith(".safetensors")]
    pickled = [name for name in names if name.endswith((".bin", ".pth", ".pt"))]
    if pickled and not others:
        anew = "write the model anew by save_pretrained(..., safe_serialization=True)"
        return f"{neither}, but {_some(pickled)}: pickled weights are not read; {anew}"
    return f"{neither}; it holds: {_some(others or names) or 'nothing'}"


def _some(items: list[str], show: int = 4) -> str:
    more = [f"and {len(items) - show} more"] if len(items) > show else []
    return ", ".join(items[:show] + more)


def _header(tensors: Mapping[str, Shape], metadata: Mapping[str, str]) -> bytes:
    """Length and header; spaces at its end put the data at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ValueError("no tensor may be called __metadata__")
        if tensor.dtype not in _NAMES:
            legal = ", ".join(map(str, _NAMES))
            raise UserError(f"tensor {name}: cannot write {tensor.dtype}; legal are {legal}")
        dtype, end = _NAMES[tensor.dtype], begin + tensor.nbytes
        entries[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _bytes(name: str, value: np.ndarray, promised: Shape) -> memoryview:
    value = np.asarray(value, order="C")
    if (value.dtype, value.shape) != promised:
        expected = f"promised {promised.dtype}{list(promised.shape)}"
        raise ValueError(f"tensor {name}: got {value.dtype}{list(value.shape)}, {expected}")
    return memoryview(value.reshape(-1).view(np.uint8))


def _shards(tensors: Mapping[str, Shape], limit: int) -> list[list[str]]:
    """Names by file: each file takes the next tensors, as many as fit."""
    shards, used = [[]], 0
    for name, tensor in tensors.items():
        used += tensor.nbytes
        if used > limit and shards[-1]:
            shards.append([])
            used = tensor.nbytes
        shards[-1].append(name)
    return shards
