"""The line between processes, and what a group makes of it, all in one process."""

import contextlib
import dataclasses
import socket
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments import cluster, configs, link
from experiments.cluster import facts, source_digest
from experiments.errors import UserError
from experiments.group import DifferError, Group, differences
from experiments.link import Ending, Hub, Link, LinkError, reach
from experiments.rows import OwnRows


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may have been closed already
        connection.shutdown(socket.SHUT_RDWR)


class Links:
    """Three ends of a line, and what each was told of the end."""

    def __init__(self, count: int = 3):
        hub = Hub(count)
        self.spokes = {}

        def call(index):
            self.spokes[index] = reach([("127.0.0.1", hub.port)], hub.token, index)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(1, count)]
        for thread in threads:
            thread.start()
        peers = hub.accept(10)
        for thread in threads:
            thread.join()
        self.told: dict[int, list[Ending]] = {i: [] for i in range(count)}
        self.changed = threading.Condition()

        def end(index):
            def heard(ending):
                with self.changed:
                    self.told[index].append(ending)
                    self.changed.notify_all()
                if index:  # as a process that ends does
                    hang_up(self.spokes[index])

            return heard

        self.ends = [Link(0, count, peers, end(0))]
        self.ends += [Link(i, count, {0: self.spokes[i]}, end(i)) for i in range(1, count)]

    def wait(self, *indices: int) -> list[Ending]:
        with self.changed:
            assert self.changed.wait_for(lambda: all(self.told[i] for i in indices), 10)
            return [ending for i in indices for ending in self.told[i]]

    def close(self):
        together(lambda i: self.ends[i].close(), len(self.ends))
        for thread in threading.enumerate():
            if thread.name.startswith("link-"):
                thread.join(10)


def together(call, count: int) -> list:
    """`call(i)` for every process at once; what each returned or raised."""
    results = [None] * count

    def one(i):
        try:
            results[i] = call(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.fixture
def links():
    made = Links()
    yield made
    made.close()


def groups_of(links) -> list[Group]:
    groups = [Group("prog") for _ in links.ends]
    for group, end in zip(groups, links.ends):
        group.connect(end)
    return groups


def test_everyone_gets_everyones_values_in_order(links):
    values = [{"a": [None, i]} for i in range(3)]
    for _ in range(3):
        assert together(lambda i: links.ends[i].exchange("x", values[i]), 3) == [values] * 3
    links.close()
    assert not any(links.told.values())  # a clean end is no death


def test_a_connection_that_closes_is_a_death_and_the_first_cause_is_everyones(links):
    for i, step in enumerate((8, 8, 7)):
        links.ends[i].post("step", None, step)
    assert links.ends[0].result("step") == [None] * 3
    assert links.ends[0].steps == [8, 8, 7]
    hang_up(links.spokes[2])
    assert links.wait(0, 1) == [Ending(2, "died", 1, 7)] * 2
    assert links.ends[0].ends_within(0) and links.ends[1].ends_within(0)


def test_what_ends_one_ends_all(links):
    links.ends[1].post("step", None, 3)
    links.ends[1].end("stopped: bad", status=2, hang=True)
    links.ends[2].end("stopped: late")
    first, *others = links.wait(0, 1, 2)
    assert first in (
        Ending(1, "stopped: bad", 2, 3, hang=True),
        Ending(2, "stopped: late", 1, None),
    )
    assert others == [first] * 2


def test_the_death_of_process_0_is_seen_by_all(links, monkeypatch):
    together(lambda i: links.ends[i].post("step", None, 5), 3)
    assert links.ends[1].result("step") == links.ends[2].result("step") == [None] * 3
    monkeypatch.setattr(links.ends[0], "_decide", lambda ending: None)  # the dead tell nothing
    for peer in links.ends[0]._peers.values():
        hang_up(peer)
    assert [e.process for e in links.wait(1, 2)] == [0, 0]
    assert links.told[1][0].last == 5


def test_a_machine_that_vanishes_is_probed_within_the_time_stated(links):
    tcp = socket.IPPROTO_TCP
    for connection in (*links.spokes.values(), *links.ends[0]._peers.values()):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, pause, probes = (
            connection.getsockopt(tcp, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + pause * probes <= link.VANISHED <= 60
        assert connection.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 1000 * link.VANISHED


def test_only_ones_own_are_let_in_and_the_missing_are_named():
    hub = Hub(3)
    calls = [lambda: hub.accept(1), lambda: reach([("127.0.0.1", hub.port)], "another", 1)]
    accepted, reached = together(lambda i: calls[i](), 2)
    assert str(accepted) == "no connection from process 1, 2"
    assert "something else" in str(reached)
    with pytest.raises(LinkError, match="refused"):
        reach([("127.0.0.1", hub.port)], hub.token, 1)


def test_a_wish_to_stop_is_agreed_for_the_same_step(links):
    groups = groups_of(links)

    def loop(i):
        for step in range(1, 20):
            if why := groups[i].stop(step, "SIGTERM" if i == 2 and step >= 7 else None):
                return step, why
        return None

    assert together(loop, 3) == [(8, "SIGTERM (process 2)")] * 3
    assert Group().stop(7, "SIGTERM") == "SIGTERM"


def test_unlike_processes_are_refused_by_all_with_both_values(links, tmp_path):
    groups = groups_of(links)
    config = configs.load("tiny")
    configs_of = [config, config, dataclasses.replace(config, seed=4, process=2)]
    found = together(lambda i: groups[i].agree(facts(configs_of[i]), "options"), 3)
    assert all(isinstance(error, DifferError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert "differ in options: seed (0 on process 0, 4 on process 2); start" in str(found[0])
    versions = [{"version of jax": v} for v in ("0.11.2", "0.11.2", "0.12.0")]
    assert "version of jax ('0.11.2' on process 0, '0.12.0' on process 2)" in differences(versions)
    # The run folder: process 1 sees another file there, process 2 none.
    for name in ("0", "1", "2"):
        (tmp_path / name).mkdir()
    (tmp_path / "0" / "env.json").write_text("new")
    (tmp_path / "1" / "env.json").write_text("old")
    look = lambda i: groups[i].check_shared(tmp_path / str(i) / "env.json", patience=0.3)
    found = together(look, 3)
    assert "not seen by process 1, process 2" in str(found[0])
    together(lambda i: groups[i].check_shared(tmp_path / "0" / "env.json", patience=0.3), 3)


@pytest.fixture(autouse=True)
def _members(monkeypatch):
    init = Group.__init__

    def named(self, *arguments):
        init(self, *arguments)
        self.members = [f"process {i}" for i in range(3)]

    monkeypatch.setattr(Group, "__init__", named)


def test_the_source_is_told_apart(tmp_path):
    (tmp_path / "jaxaccel").mkdir()
    file = tmp_path / "jaxaccel" / "nn.py"
    digests = set()
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        digests.add(source_digest(tmp_path))
    file.rename(tmp_path / "jaxaccel" / "mm.py")
    digests.add(source_digest(tmp_path))
    assert len(digests) == 3
    assert "source code" in facts(configs.load("tiny"))


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}
SLURM |= {"SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_what_starts_several_processes_is_recognised():
    def many(environ, **options):
        return cluster.many(dataclasses.replace(configs.load("tiny"), **options), environ)

    assert not many({})
    assert many(SLURM) and many({"OMPI_COMM_WORLD_SIZE": "2"})
    assert not many(SLURM | {"SLURM_NTASKS": "1"}) and not many({"OMPI_COMM_WORLD_SIZE": "1"})
    batch_script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}
    assert not many(batch_script)  # outside of srun
    assert not many(SLURM, processes=1)
    assert not many(POD)
    with pytest.raises(UserError, match=r"pip install 'jax\[k8s\]'"):
        many(POD | {"JOB_COMPLETION_INDEX": "0"})
    given = {"coordinator": "host:1234", "processes": 4, "process": 3}
    assert many({}, **given) and many(POD | {"JOB_COMPLETION_INDEX": "0"}, **given)
    for wrong, message in (
        ({"process": 4}, "--process is 4; it must be one of 0 to 3"),
        ({"process": None}, "--process is None"),
        ({"processes": None}, "--processes is None"),
        ({"coordinator": "host"}, "--coordinator is 'host'; write HOST:PORT"),
        ({"coordinator": "host:0"}, "write HOST:PORT"),
        ({"coordinator": ""}, "write HOST:PORT"),
    ):
        with pytest.raises(UserError, match=message):
            many({}, **given | wrong)


def test_a_slurm_task_alone_on_its_node_has_all_of_its_gpus():
    node = {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_ON_NODE": "8"}
    assert cluster.one_task_devices(node) == list(range(8))
    assert cluster.one_task_devices(node | {"SLURM_STEP_TASKS_PER_NODE": "1"}) == list(range(8))
    assert cluster.one_task_devices(node | {"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}) is None
    assert cluster.one_task_devices(node | {"JAX_LOCAL_DEVICE_IDS": "0"}) is None
    assert cluster.one_task_devices({}) is None


def test_own_rows_are_those_of_the_devices():
    class Sharding:
        """Devices of a process that have rows 4, 5 and, as copies of others, 0, 1."""

        def addressable_devices_indices_map(self, shape):
            assert shape == (6, 8)
            rows = (slice(4, 6), slice(0, 2), slice(4, 6))
            return {i: (row, slice(None)) for i, row in enumerate(rows)}

    assert OwnRows(Sharding(), 6, 8).numbers.tolist() == [0, 1, 4, 5]  # type: ignore
    mesh = jax.make_mesh((2, 4), ("rows", "places"), axis_types=(AxisType.Auto,) * 2)
    own = OwnRows(NamedSharding(mesh, PartitionSpec("rows", "places")), 6, 8)
    assert own.numbers.tolist() == list(range(6))
    batch = {k: np.arange(48).reshape(6, 8) for k in ("tokens", "labels", "segments", "positions")}
    placed = own.place(batch | {"documents": np.zeros(1)})
    assert placed.keys() == batch.keys()
    for array in placed.values():
        assert array.sharding == own.sharding
        np.testing.assert_array_equal(array, batch["tokens"])
