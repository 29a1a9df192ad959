"""A manifest of a folder's files: what tells a whole checkpoint from one cut short.

Written last, with the size and CRC-32 of every file and a checksum of its own.
"""

import json
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"
_READ_BYTES = 1 << 22


class DamagedError(Exception):
    """Why a checkpoint is not whole."""


def write_json(path: Path, obj: Any) -> None:
    """Writes JSON so that a crash at any moment leaves the old file or the new one, whole.

    Args:
      path: the file; its folder exists.
      obj: what `json.dumps` takes.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(obj, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def write(folder: Path, arrays: dict[str, str]) -> None:
    """Sums up `folder` in a manifest, and flushes all of it to disk.

    Args:
      folder: what is to be whole from now on.
      arrays: shape and dtype by name, to be kept along.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, file_crc]
        for path, file_crc in zip(paths, _in_threads(_crc32, paths), strict=True)
    }
    crc = _manifest_crc32(arrays, files)
    write_json(folder / _MANIFEST, {"arrays": arrays, "files": files, "crc32": crc})
    _in_threads(sync, [folder, *folder.rglob("*")])


def read(path: Path) -> dict[str, Any]:
    """The manifest of a folder whose files are all there and have their sizes.

    Raises:
      DamagedError: they are not, or the manifest itself is missing or altered.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        if manifest["crc32"] != _manifest_crc32(manifest["arrays"], manifest["files"]):
            raise ValueError("wrong checksum")
    except FileNotFoundError:
        raise DamagedError(f"{_MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError):  # not JSON, or not what was written
        raise DamagedError(f"{_MANIFEST} is cut short or altered") from None
    for name, (size, _) in manifest["files"].items():
        try:
            got = (path / name).stat().st_size
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        if got != size:
            raise DamagedError(f"{name} has {got} bytes instead of {size}")
    return manifest


def is_whole(path: Path) -> bool:
    """Whether all files are there and have their sizes; checksums are not looked at."""
    try:
        read(path)
    except DamagedError:
        return False
    return True


def check_sums(
    path: Path, manifest: dict[str, Any], skip: Sequence[str], share: slice = slice(None)
) -> None:
    """Reads every file, but those below the folders `skip`, against its checksum.

    `share`: of the files, the ones that this process reads.
    """
    sums = {
        name: crc
        for name, (_, crc) in manifest["files"].items()
        if not name.startswith(tuple(skip))
    }
    sums = dict([*sums.items()][share])
    for name, crc in zip(sums, _in_threads(_crc32, [path / name for name in sums]), strict=True):
        if crc != sums[name]:
            raise DamagedError(f"{name} has a wrong checksum")


def _manifest_crc32(arrays: dict[str, str], files: dict[str, list[int]]) -> int:
    return zlib.crc32(json.dumps([arrays, files]).encode())


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_threads[T](function: Callable[[Path], T], paths: list[Path]) -> list[T]:
    """Eight at a time: checksums release the GIL, and a disk merges flushes that wait for it."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(function, paths))
