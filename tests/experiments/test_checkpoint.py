"""Checkpoints: bit-equal on any mesh, safe from crashes, damage, full disks and donation."""

import dataclasses
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments import manifest
from experiments.checkpoint import Checkpoints, SaveError
from experiments.errors import UserError
from experiments.manifest import write_json


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """One of everything that a training state may hold."""

    params: dict
    optimizer: optax.OptState
    step: jax.Array
    key: jax.Array
    codes: dict


def make_state(seed: int = 0, width: int = 16) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "layers": {"w": jax.random.normal(keys[0], (24, width)), "b": jnp.full(5, jnp.nan)},
        "embed": jax.random.normal(keys[1], (8, 3)).astype(jnp.bfloat16),
    }
    return TrainState(
        params=params,
        optimizer=optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
        step=jnp.int32(seed),
        key=jax.random.key_data(keys[0]),
        codes={
            "uint8": jnp.arange(250, dtype=jnp.uint8),
            "half": jnp.array([1.5, -0.0, jnp.inf], jnp.float16),
            "fp8": jnp.array([[0.5, 448.0]], jnp.float8_e4m3fn),
            "empty": jnp.zeros((0, 3), jnp.bfloat16),
            "count": jnp.uint32(2**32 - 1),
            "flag": jnp.array(True),
            "host": np.arange(7, dtype=np.int32),
        },
    )


def shardings(tree, mesh_shape: dict[str, int], specs: dict[int, PartitionSpec]):
    """A sharding for each leaf: by its rank, replicated where a dimension does not divide."""
    mesh = jax.make_mesh(
        tuple(mesh_shape.values()),
        tuple(mesh_shape),
        axis_types=(AxisType.Auto,) * len(mesh_shape),
        devices=jax.devices()[: int(np.prod(list(mesh_shape.values())))],
    )

    def one(leaf):
        sharding = NamedSharding(mesh, specs.get(leaf.ndim, PartitionSpec()))
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError:
            return NamedSharding(mesh, PartitionSpec())
        return sharding

    return jax.tree.map(one, tree)


LAYOUTS = {
    "one": ({"fsdp": 1}, {}),
    "fsdp8": ({"fsdp": 8}, {2: PartitionSpec("fsdp")}),
    "fsdp4_tensor2": ({"fsdp": 4, "tensor": 2}, {2: PartitionSpec("fsdp", "tensor")}),
}


def abstract(tree, sharding=None):
    sharding = sharding or jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding
    )


def assert_bit_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) and (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.fixture
def two(tmp_path):
    """Folder with whole checkpoints of steps 1 and 2."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), {"position": 1})
        checkpoints.save(2, make_state(2), {"position": 2})
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp8", "one"), ("one", "fsdp8"), ("fsdp8", "fsdp4_tensor2"), ("fsdp4_tensor2", "fsdp8")],
)
def test_restores_bit_equal_onto_another_mesh(tmp_path, before, after):
    state = make_state(3)
    saved = jax.device_put(state, shardings(state, *LAYOUTS[before]))
    wanted = shardings(state, *LAYOUTS[after])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, saved, {"documents": [3, {"offset": 2**40}]})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(abstract(state, wanted))
    assert restored.step == 3 and restored.data_state == {"documents": [3, {"offset": 2**40}]}
    assert_bit_equal(restored.state, state)
    for leaf, sharding in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted)):
        assert leaf.sharding == sharding
    split = restored.state.params["layers"]["w"].addressable_shards[0].data.shape
    assert split == {"one": (24, 16), "fsdp8": (3, 16), "fsdp4_tensor2": (6, 8)}[after]


def test_donated_buffers_may_be_reused_while_saving(tmp_path, monkeypatch):
    state = {f"w{i}": jnp.full((512, 512), float(i)) for i in range(8)}
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    like = abstract(state)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0)
    finish, started, go = Checkpoints._finish, threading.Event(), threading.Event()

    def held(*args):
        started.set()
        assert go.wait(30)
        finish(*args)

    monkeypatch.setattr(Checkpoints, "_finish", held)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {})
        assert started.wait(30)  # save has returned although the checkpoint is not whole
        assert checkpoints.steps() == []
        for _ in range(5):
            state = update(state)
        jax.block_until_ready(state)
        go.set()
        checkpoints.wait()
        assert_bit_equal(checkpoints.restore(like).state, expected)


def test_part_is_read_without_the_rest(two):
    state = make_state(2)
    # Right size, wrong content: only a reader of the optimizer state may mind.
    victim = next((two / "00000002" / "state").glob("optimizer*mu.layers.w/0.0"))
    victim.write_bytes(b"\x01" * victim.stat().st_size)
    with Checkpoints(two) as checkpoints:
        restored = checkpoints.restore_part(abstract(state.params), "params")
        assert restored.step == 2 and restored.data_state == {"position": 2}
        assert_bit_equal(restored.state, state.params)
        weight = abstract(state.params["layers"]["w"])
        assert_bit_equal(
            checkpoints.restore_part(weight, "params.layers.w", step=1).state,
            make_state(1).params["layers"]["w"],
        )
        with pytest.raises(UserError, match=r"checksum"):
            checkpoints.restore(abstract(state), step=2)
        with pytest.raises(UserError, match=r"param\.embed: got nothing, expected bfloat16\[8,3\]"):
            checkpoints.restore_part(abstract(state.params), "param")


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [remove, empty, truncate, flip])
@pytest.mark.parametrize(
    "name", ["state/params.layers.w/0.0", "state/step/.zarray", "state/_METADATA", "data.json"]
)
def test_damaged_checkpoint_is_passed_over(two, capfd, name, damage):
    damage(two / "00000002" / name)
    with Checkpoints(two) as checkpoints:
        restored = checkpoints.restore(abstract(make_state()))
        assert restored.step == 1 and restored.data_state == {"position": 1}
        assert_bit_equal(restored.state, make_state(1))
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("warning: ") and str(two / "00000002") in line and name in line
        with pytest.raises(UserError, match=r"00000002 is damaged"):
            checkpoints.restore(abstract(make_state()), step=2)
        # Training goes on from step 1 and comes by step 2 again.
        checkpoints.save(2, make_state(22), {"position": 22}, wait=True)
        assert_bit_equal(checkpoints.restore(abstract(make_state())).state, make_state(22))
    assert capfd.readouterr().err == ""
    assert sorted(p.name for p in two.iterdir()) == ["00000001", "00000002"]


def drop_last_brace(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize("damage", [remove, empty, drop_last_brace, flip])
def test_damaged_manifest(two, capfd, damage):
    damage(two / "00000002" / "manifest.json")
    with Checkpoints(two) as checkpoints:
        assert checkpoints.steps() == [1] and checkpoints.latest == 1
        assert checkpoints.restore(abstract(make_state())).step == 1
    assert "manifest.json" in capfd.readouterr().err


def test_every_checkpoint_damaged_or_none(tmp_path, two, capfd):
    for path in two.iterdir():
        truncate(path / "data.json")
    with Checkpoints(two) as checkpoints:
        assert checkpoints.restore(abstract(make_state())) is None
        assert checkpoints.latest is None
    assert len(capfd.readouterr().err.splitlines()) == 2
    with Checkpoints(tmp_path / "nothing") as checkpoints:
        assert checkpoints.restore(abstract(make_state())) is None
        with pytest.raises(UserError, match=r"no checkpoint of step 5 in .*; there are: none"):
            checkpoints.restore(abstract(make_state()), step=5)
    assert not (tmp_path / "nothing").exists()


def test_killed_while_replacing(two, capfd):
    """Between the two renames the earlier checkpoint of that step is found as STEP.old."""
    (two / "00000002").rename(two / "00000002.old")
    (two / "00000002.tmp").mkdir()
    (two / "notes.tmp").touch()  # not ours
    with Checkpoints(two) as checkpoints:
        assert checkpoints.restore(abstract(make_state())).step == 2
        assert capfd.readouterr().err == ""
        checkpoints.save(2, make_state(22), {}, wait=True)
        assert_bit_equal(checkpoints.restore(abstract(make_state())).state, make_state(22))
    assert sorted(p.name for p in two.iterdir()) == ["00000001", "00000002", "notes.tmp"]


CHILD = """
import sys, time, jax.numpy as jnp
from pathlib import Path
from experiments import checkpoint, manifest
folder, stop_at = Path(sys.argv[1]), sys.argv[2]
state = lambda step: {"w": jnp.full((512, 1024), step, jnp.float32), "step": jnp.int32(step)}
checkpoints = checkpoint.Checkpoints(folder)
checkpoints.save(1, state(1), {"step": 1}, wait=True)
checkpoints.save(2, state(2), {"step": 2}, wait=True)
def stop(*args, **kwargs):  # on several threads at once, whose `print`s would mix
    sys.stdout.write("here\\n")
    sys.stdout.flush()
    time.sleep(60)
if stop_at == "data written":
    manifest._crc32 = stop
elif stop_at == "before the rename":
    Path.rename = stop
else:
    print("here", flush=True)
for step in range(3, 1000):
    checkpoints.save(step, state(step), {"step": step})
"""


@pytest.mark.parametrize("stop_at", ["data written", "before the rename", "any"])
def test_kill_9_while_saving(tmp_path, capfd, stop_at):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), stop_at],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert child.stdout.readline() == "here\n", child.communicate()[1]
    if stop_at == "any":
        time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    assert child.communicate()[1] == ""  # nothing of Orbax on stderr
    assert child.returncode == -signal.SIGKILL
    like = abstract({"w": jnp.zeros((512, 1024)), "step": jnp.int32(0)})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(like)
        if stop_at == "any":
            assert restored.step > 2
        else:
            assert restored.step == 2
            (line,) = capfd.readouterr().err.splitlines()
            assert line.startswith("warning: ") and f"{tmp_path}/00000003.tmp" in line
            manifest = tmp_path / "00000003.tmp" / "manifest.json"
            assert manifest.exists() == (stop_at == "before the rename")
        assert (
            restored.data_state == {"step": restored.step} == {"step": int(restored.state["step"])}
        )
        assert (np.asarray(restored.state["w"]) == restored.step).all()
        capfd.readouterr()
        again = {"w": jnp.full((512, 1024), 0.5), "step": jnp.int32(7)}
        checkpoints.save(restored.step + 1, again, {}, wait=True)
        assert_bit_equal(checkpoints.restore(like).state, again)
    assert capfd.readouterr().err == ""
    assert not list(tmp_path.glob("*.tmp"))


def test_mismatch_is_an_error_and_names_the_arrays(two, capfd):
    state = make_state(2)
    wrong = dataclasses.replace(
        state,
        params={
            **state.params,
            "layers": {"w": jnp.zeros((24, 17)), "b": jnp.zeros(5, jnp.float16)},
        },
        codes={"extra": jnp.zeros(())},
    )
    with Checkpoints(two) as checkpoints:
        with pytest.raises(UserError, match=r"holds other arrays than asked for") as error:
            checkpoints.restore(abstract(wrong))
        message = str(error.value)
        assert "\n" not in message and message.endswith("; and 6 more")
        assert "codes.count: got uint32[], expected nothing" in message
        assert "codes.extra: got nothing, expected float32[]" in message
        with pytest.raises(UserError) as error:
            checkpoints.restore_part(abstract(wrong.params), "params")
        assert str(error.value).endswith(
            "params.layers.b: got float32[5], expected float16[5]; "
            "params.layers.w: got float32[24,16], expected float32[24,17]"
        )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("surfaces_at", ["wait", "save", "close", "restore"])
def test_no_space_left(two, monkeypatch, surfaces_at):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(two)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_crc32", full)
        checkpoints.save(3, make_state(3), {})
        with pytest.raises(SaveError) as error:
            {
                "wait": checkpoints.wait,
                "save": lambda: checkpoints.save(4, make_state(4), {}),
                "close": checkpoints.close,
                "restore": lambda: checkpoints.restore(abstract(make_state())),
            }[surfaces_at]()
    assert isinstance(error.value, UserError)
    message = str(error.value)
    assert str(two / "00000003") in message and "no space left" in message and "\n" not in message
    assert " bytes free" in message
    assert sorted(p.name for p in two.iterdir()) == ["00000001", "00000002"]
    if surfaces_at != "close":
        checkpoints.save(3, make_state(3), {}, wait=True)
        assert checkpoints.restore(abstract(make_state())).step == 3
    checkpoints.close()


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


# Of writes that fail together Orbax raises one and closes its loop; one that comes later finds it
# closed, which Python can tell nobody but the interpreter.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_full_disk(small_disk, capfd):
    like = abstract({"w": jnp.zeros(250_000)})
    with Checkpoints(small_disk / "checkpoints") as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(250_000)}, {}, wait=True)
        for size in (700_000, 522_000):  # fails in a data file; in what comes after it
            checkpoints.save(2, {"w": jnp.ones(size)}, {})
            with pytest.raises(
                SaveError, match=r"no space left on device, \d+ bytes free; earlier"
            ):
                checkpoints.wait()
            assert (checkpoints.restore(like).state["w"] == 1).all()
        checkpoints.save(2, {"w": jnp.zeros(250_000)}, {}, wait=True)
        assert (checkpoints.restore(like).state["w"] == 0).all()
    assert capfd.readouterr().err == ""


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        Checkpoints(tmp_path / "file") as checkpoints,
        pytest.raises(SaveError, match=r"cannot save checkpoint .*file/00000001"),
    ):
        checkpoints.save(1, {"w": jnp.ones(2)}, {})


def test_keeps_the_newest(tmp_path):
    state = {"w": jnp.ones(3)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (3, 10, 25, 100_000_000):
            checkpoints.save(step, state, {}, wait=True)
        assert checkpoints.steps() == [25, 100_000_000] and checkpoints.latest == 100_000_000
        # Damage with the right size goes unnoticed until it is read; it must not crowd out 30.
        flip(tmp_path / "100000000" / "state" / "w" / "0")
        checkpoints.save(30, state, {}, wait=True)
        assert checkpoints.steps() == [25, 30, 100_000_000]
    with pytest.raises(UserError, match=r"got 0, need at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_quiet_without_hiding_others(two, capfd, caplog):
    with Checkpoints(two) as checkpoints:
        checkpoints.save(3, make_state(3), {}, wait=True)
        logging.getLogger("absl").warning("not of Orbax")
        # What asyncio logs of the writes that failed beside the one that was raised.
        logging.getLogger("asyncio").error(f"Task exception: {ocp.__file__}:126")
        logging.getLogger("asyncio").error("of another task")
    assert [record.message for record in caplog.records] == ["not of Orbax", "of another task"]
    assert capfd.readouterr().out == ""


def test_nothing_is_pickled(two):
    for path in two.rglob("*"):
        if path.is_file():
            assert not path.read_bytes().startswith(b"\x80\x04"), path


def test_write_json_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_json(path, {"a": [1, 2.5, "é"]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, 2.5, "é"]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_json(path, {"b": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, 2.5, "é"]}
