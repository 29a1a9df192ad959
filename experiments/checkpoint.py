"""Checkpoints of one training run: asynchronous, resharding, proof against a crash.

Orbax copies the state off the devices and writes it; what Orbax does not do is done here.
A truncated or missing data file does not make its restore fail (a missing chunk reads as
zeros), so each checkpoint ends with a manifest, written last, of the size and the CRC-32 of
every file. A checkpoint is built in `STEP.tmp`, flushed to disk, and renamed to `STEP`:

    FOLDER/00000100/data.json       position in the data
    FOLDER/00000100/state/KEY/...   one array each, raw chunks (Zarr), KEY like `params.embed`
    FOLDER/00000100/manifest.json   shapes and dtypes of the arrays, sizes and sums of the files

One folder an array (not OCDBT, Orbax's default, which packs all arrays together) lets a
part of the state be read, and its checksums verified, without touching the rest. The state
is saved as a flat dictionary: what decides whether a checkpoint fits are the names, shapes
and dtypes of its arrays, whatever classes the tree is made of.

Of several processes each calls `save` and writes its shards; process 0 makes and renames the
folder, writes the data position and, once all have written, the manifest. On reading, process 0
decides which checkpoint; the checksums are divided among all. The folder must be one that all
processes see.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from experiments import manifest
from experiments.errors import UserError
from experiments.group import Group
from experiments.manifest import DamagedError, write_json

PyTree = Any

_DATA = "data.json"
_STATE = "state"


class SaveError(UserError):
    """A checkpoint could not be written; the ones before it are kept."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held: the state, as jax.Arrays sharded as asked, and the data position."""

    step: int
    state: PyTree
    data_state: dict


class Checkpoints:
    """The checkpoints in one folder: `save` returns at once, `restore` reads the newest whole one.

    Nothing is created before the first `save`. Use it as a context manager, or `close` it:
    a failure of the last save surfaces there.

    Args:
      folder: where checkpoints lie, one folder a step.
      keep: how many to keep; older ones are deleted once a newer one is whole.
      group: the processes that call this together; without, this one alone.
    """

    def __init__(self, folder: Path, *, keep: int = 3, group: Group | None = None):
        if keep < 1:
            raise UserError(f"checkpoints to keep: got {keep}, need at least 1")
        logging.getLogger("absl").addFilter(_not_from_orbax)
        logging.getLogger("asyncio").addFilter(_not_of_orbax_tasks)
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._group = group or Group()
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._orbax = ocp.AsyncCheckpointer(
            # Compression costs more time than the tenth it takes off trained weights is worth.
            ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False),
            # Else a failure to create the folder is reported minutes later, as a time-out.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            multiprocessing_options=_processes(self._group),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, state: PyTree, data_state: dict, *, wait: bool = False) -> None:
        """Starts to write a checkpoint; returns when the state has been copied off the devices.

        The state's buffers may be donated as soon as this returns. Waits for the save before
        it, should that still be running. A checkpoint of the same step is replaced.

        Args:
          step: number of optimizer steps done.
          state: pytree of arrays.
          data_state: position in the data; JSON.
          wait: return only when the checkpoint is whole.

        Raises:
          SaveError: this save, or the one before it, failed: no space left, say.
        """
        self.wait()
        leaves = flatten(state)
        tmp = self.path(step, ".tmp")
        try:
            if self._group.first:
                for leftover in self._listed(".tmp").values():
                    shutil.rmtree(leftover)
                tmp.mkdir(parents=True)
                write_json(tmp / _DATA, data_state)
            # Orbax refuses arrays of size zero; the manifest tells all there is to know of them.
            arrays = {key: leaf for key, leaf in leaves.items() if leaf.size}
            self._orbax.save(tmp / _STATE, args=ocp.args.PyTreeSave(arrays))
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error
        kinds = {key: _kind(leaf) for key, leaf in leaves.items()}
        self._pending = self._thread.submit(self._finish, step, kinds)
        if wait:
            self.wait()

    def restore(self, like: PyTree, *, step: int | None = None) -> Restored | None:
        """Reads a checkpoint; without `step` the newest whole one, None if there is none.

        Newer ones that are not whole are passed over, with a line on stderr each.

        Args:
          like: the state as `jax.ShapeDtypeStruct`s with shardings, on any mesh; without a
            sharding an array goes to the first device.
          step: the checkpoint to read.

        Raises:
          UserError: the checkpoint's arrays are not those of `like`, or there is no whole
            checkpoint of `step`.
        """
        return self.restore_part(like, "", step=step)

    def restore_part(self, like: PyTree, part: str, *, step: int | None = None) -> Restored | None:
        """Reads one part of the state, as `restore` does, without reading the rest.

        Args:
          like: the part as `jax.ShapeDtypeStruct`s with shardings.
          part: dotted path of the part within the saved state, such as `params`.
          step: the checkpoint to read; the newest whole one by default.

        Returns:
          `state` is the part. None if there is no whole checkpoint.
        """
        self.wait()
        if step is None:
            return self._read_newest(like, part)
        candidates = self._found()
        if step not in candidates:
            known = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"no checkpoint of step {step} in {self.folder}; there are: {known}")
        try:
            self._check(candidates[step], like, part)
        except DamagedError as damage:
            raise UserError(f"checkpoint {candidates[step]} is damaged: {damage}") from None
        return self._load(step, candidates[step], like, part)

    def _read_newest(self, like: PyTree, part: str) -> Restored | None:
        """The newest one that every process finds whole; process 0 says which there are."""
        mine = self._listed(".tmp") | self._found()
        order = sorted(((step, path.name) for step, path in mine.items()), reverse=True)
        for step, name in self._group.exchange("checkpoints", order)[0]:
            path, damage = self.folder / name, None
            try:
                self._check(path, like, part)
            except DamagedError as error:
                damage = str(error)
            found = [text for text in self._group.exchange("damage", damage) if text]
            if not found:
                return self._load(step, path, like, part)
            if self._group.first:
                print(f"warning: passing over checkpoint {path}: {found[0]}", file=sys.stderr)
        return None

    def steps(self) -> list[int]:
        """Returns the steps of the whole checkpoints, ascending (by file sizes, not checksums)."""
        return [step for step, path in sorted(self._found().items()) if manifest.is_whole(path)]

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the newest whole checkpoint holds, by dotted name; empty if there is none."""
        if self.latest is None:
            return {}
        kinds = manifest.read(self._found()[self.latest])["arrays"]
        return {key: _shape(kind) for key, kind in kinds.items()}

    @property
    def latest(self) -> int | None:
        """The newest of `steps`, None if there is none."""
        return max(self.steps(), default=None)

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that warns people."""
        return self._group.first

    def wait(self) -> None:
        """Returns when no save is running.

        Raises:
          SaveError: the save that was running failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for a running save, and ends the background threads.

        Raises:
          SaveError: the save that was running failed.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def path(self, step: int, suffix: str = "") -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"{step:08d}{suffix}"

    def _listed(self, suffix: str = "") -> dict[int, Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        pattern = re.compile(r"(\d{8,})" + re.escape(suffix))
        matches = ((pattern.fullmatch(path.name), path) for path in paths if path.is_dir())
        return {int(match[1]): path for match, path in matches if match}

    def _found(self) -> dict[int, Path]:
        """Each checkpoint, whole or damaged; STEP.old counts only where STEP is missing."""
        return self._listed(".old") | self._listed()

    def _finish(self, step: int, kinds: dict[str, str]) -> None:
        """In the background: waits for Orbax, writes the manifest, renames, deletes old ones."""
        tmp, final, old = (self.path(step, suffix) for suffix in (".tmp", "", ".old"))
        try:
            self._orbax.wait_until_finished()
            if not self._group.first:  # Orbax has waited for all to have written
                return
            manifest.write(tmp, kinds)
            # A folder cannot be replaced by one rename. Killed between these two, `old` is read.
            if final.exists():
                if old.exists():
                    shutil.rmtree(old)
                final.rename(old)
            tmp.rename(final)
            manifest.sync(self.folder)
            self._prune(step)
        except (OSError, ValueError) as error:
            failed = self._failed(step, error)
            self._group.fail(f"stopped: {failed}")  # the others wait for its shards
            raise failed from error

    def _prune(self, step: int) -> None:
        """Deletes what is older than the `keep` newest whole ones up to `step`.

        Newer ones than the one just saved do not count: they were passed over as damaged.
        """
        kept = [known for known in self.steps() if known <= step][-self.keep :]
        found = self._found()
        for known, path in found.items():
            if known < kept[0]:
                shutil.rmtree(path)
        for path in self._listed(".old").values():
            if path not in found.values():
                shutil.rmtree(path)

    def _failed(self, step: int, error: Exception) -> SaveError:
        """The error to raise; deletes the failed attempt, which may be what fills the disk."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "No space left on device" in str(error):
            existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            reason = f"no space left on device, {shutil.disk_usage(existing).free} bytes free"
        shutil.rmtree(self.path(step, ".tmp"), ignore_errors=True)
        return SaveError(
            f"cannot save checkpoint {self.path(step)}: {reason}; earlier checkpoints are kept"
        )

    def _check(self, path: Path, like: PyTree, part: str) -> None:
        """Whether the checkpoint holds what is wanted, and (this process' share of) its sums."""
        if path.suffix == ".tmp":
            raise DamagedError("its save was cut short, or is not over")
        contents = manifest.read(path)
        wanted = flatten(like, part)
        within = {
            key: kind
            for key, kind in contents["arrays"].items()
            if not part or key == part or key.startswith(part + ".")
        }
        _check_fit(path, within, {key: _kind(leaf) for key, leaf in wanted.items()})
        others = contents["arrays"].keys() - wanted.keys()
        share = slice(self._group.index, None, self._group.count)
        manifest.check_sums(
            path, contents, skip=[f"{_STATE}/{key}/" for key in others], share=share
        )

    def _load(self, step: int, path: Path, like: PyTree, part: str) -> Restored:
        wanted = flatten(like, part)
        first = SingleDeviceSharding(jax.local_devices()[0])
        abstract = {
            key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first)
            for key, leaf in wanted.items()
        }
        stored = {key: leaf for key, leaf in abstract.items() if leaf.size}
        args = ocp.args.PyTreeRestore(
            stored,
            restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
            partial_restore=True,
        )
        arrays = self._orbax.restore(path / _STATE, args=args) if stored else {}
        leaves = [
            arrays[key] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for key, leaf in abstract.items()
        ]
        return Restored(
            step=step,
            state=jax.tree.unflatten(jax.tree.structure(like), leaves),
            data_state=json.loads((path / _DATA).read_text()),
        )


def _processes(group: Group) -> ocp.options.MultiprocessingOptions:
    """For Orbax: whom it has to wait for."""
    if group.count > 1 or jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    alone = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=alone, active_processes={alone}, barrier_sync_key_prefix=f"alone-{alone}"
    )


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Logging filter. Orbax warns of what is normal here, and logs what it raises as well."""
    return not record.pathname.startswith(os.path.dirname(ocp.__file__))


def _not_of_orbax_tasks(record: logging.LogRecord) -> bool:
    """Logging filter. Of writes that fail together, Orbax raises one; asyncio logs the others."""
    return os.path.dirname(ocp.__file__) not in record.getMessage()


def flatten(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted path, in the tree's order."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        key = jax.tree_util.keystr(path, simple=True, separator=".")
        key = ".".join(filter(None, (prefix, key)))
        if not key or "/" in key or key in leaves:
            raise ValueError(
                f"{key!r} cannot name an array in a checkpoint: not a unique file name"
            )
        leaves[key] = leaf
    return leaves


def _kind(leaf: Any) -> str:
    """Dtype and shape, as in `float32[3,4]`."""
    return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"


def _shape(kind: str) -> jax.ShapeDtypeStruct:
    """Of a `_kind`."""
    dtype, _, dims = kind[:-1].partition("[")
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, dims.split(",")))), dtype)


def _check_fit(path: Path, stored: dict[str, str], wanted: dict[str, str], show: int = 4) -> None:
    differing = [
        f"{key}: got {stored.get(key, 'nothing')}, expected {wanted.get(key, 'nothing')}"
        for key in sorted(stored.keys() | wanted.keys())
        if stored.get(key) != wanted.get(key)
    ]
    if differing:
        more = f"; and {len(differing) - show} more" if len(differing) > show else ""
        raise UserError(
            f"checkpoint {path} holds other arrays than asked for: "
            f"{'; '.join(differing[:show])}{more}"
        )
