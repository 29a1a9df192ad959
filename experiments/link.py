"""A line between the processes of a run, apart from JAX's own: small facts, and who has died.

Every process holds one TCP connection to process 0. When a process dies, however it dies, its
kernel closes the connection and process 0 knows at once; of a machine that vanishes the kernel's
probes tell after `VANISHED` seconds. Process 0 then says so to all others, and each process ends
itself: its main thread waits in a collective that nobody will finish. If process 0 dies, every
other process sees that for itself.

On the same line the processes exchange small values, by name: each posts one, process 0 hands
everyone the list. Posting does not wait, so that what is posted at one step (does anyone want to
stop?) can be read at the next for nothing.

What could be better: process 0 has a thread for each other process, which will do for hundreds
of them and not for tens of thousands.
"""

import contextlib
import dataclasses
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

VANISHED = 30  # seconds after which a machine that no longer answers counts as dead
_GRACE = 3.0  # seconds for others to hang up, before this process ends
_HELLO = 10.0


class LinkError(Exception):
    """Why processes did not find one another."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a run ends: the first cause that process 0 heard of."""

    process: int
    what: str  # what happened to it, as in `died`
    status: int  # that every process exits with
    last: int | None  # the last step that the process was known to be at
    hang: bool = False  # every process writes its stacks


class Hub:
    """Where process 0 waits for the others, until `accept` has them all."""

    def __init__(self, count: int):
        self._count = count
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, backlog=count, dualstack_ipv6=both
        )
        self.port = self._server.getsockname()[1]
        self.token = secrets.token_hex(8)

    def accept(self, timeout: float) -> dict[int, socket.socket]:
        """A connection to each other process.

        Raises:
          LinkError: they did not all come in time; names the missing.
        """
        peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        with self._server:
            while len(peers) < self._count - 1:
                self._server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    peer, _ = self._server.accept()
                except TimeoutError:
                    missing = sorted({*range(1, self._count)} - {*peers})
                    raise LinkError(f"no connection from process {_some(missing)}") from None
                index = self._greet(peer)
                if index is None:  # not one of ours
                    peer.close()
                else:
                    peers[index] = peer
        return peers

    def _greet(self, peer: socket.socket) -> int | None:
        """Whose connection this is; None if it does not know the token."""
        try:
            peer.settimeout(_HELLO)
            token, index = peer.recv(64).decode("ascii", "replace").split()
            if token != self.token:
                return None
            peer.sendall(b"ok\n")
            return int(index)
        except (OSError, ValueError):
            return None


def reach(addresses: Iterable[tuple[str, int]], token: str, index: int) -> socket.socket:
    """Connects to the hub at whichever of its addresses answers with `token`.

    Raises:
      LinkError: none does; says what came of each.
    """
    tried = []
    for host, port in addresses:
        with contextlib.ExitStack() as stack:
            try:
                peer = stack.enter_context(socket.create_connection((host, port), _HELLO))
                peer.sendall(f"{token} {index}\n".encode())
                if peer.recv(3) == b"ok\n":
                    stack.pop_all()
                    return peer
                tried.append(f"{host}:{port} is something else")
            except OSError as error:
                tried.append(f"{host}:{port}: {error.strerror or error}")
    raise LinkError("; ".join(tried))


class Link:
    """This process' end of the line.

    Args:
      index: of this process.
      count: of processes.
      peers: a connection to every other process on process 0, to process 0 elsewhere.
      on_end: is called once, on a thread of the link, when the run has to end.
    """

    def __init__(
        self,
        index: int,
        count: int,
        peers: dict[int, socket.socket],
        on_end: Callable[[Ending], None],
    ):
        self.index, self.count = index, count
        # The last step that each process has posted, as far as it is known here.
        self.steps: list[int | None] = [None] * count
        self._peers, self._on_end = peers, on_end
        self._posted: dict[str, dict[int, Any]] = {}  # on process 0, until all have
        self._results: dict[str, list[Any]] = {}
        self._counts: dict[str, int] = {}
        self._said_bye: set[int] = set()
        self._hung_up: set[int] = set()
        self._ending: Ending | None = None
        self._changed = threading.Condition()
        self._sending = {peer: threading.Lock() for peer in peers}
        for peer, connection in peers.items():
            probe(connection)
            thread = threading.Thread(
                target=self._listen, args=(peer, connection), name=f"link-{peer}", daemon=True
            )
            thread.start()

    def post(self, name: str, value: Any, step: int | None = None) -> None:
        """Hands in this process' value of `name`, JSON; `step` is where the process is."""
        if step is not None:
            self.steps[self.index] = step
        if self.index == 0:
            self._collect(0, name, value)
        else:
            self._send(0, {"post": name, "value": value, "step": step})

    def result(self, name: str) -> list[Any]:
        """Waits until every process has posted `name`; the values, by process. Once a name."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._results)
            return self._results.pop(name)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Everyone's values. To be called by all processes, equally often for each name."""
        with self._changed:
            self._counts[name] = number = self._counts.get(name, 0) + 1
        self.post(f"{name} {number}", value)
        return self.result(f"{name} {number}")

    def end(self, what: str, *, status: int = 1, hang: bool = False) -> None:
        """Ends the run on every process, because of this one; `on_end` is called soon after."""
        ending = Ending(self.index, what, status, self.steps[self.index], hang)
        if self.index == 0:
            self._decide(ending)
        else:
            self._send(0, {"end": dataclasses.asdict(ending)})

    def ends_within(self, seconds: float) -> bool:
        """Whether the end comes in that time; waits for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ending is not None, seconds)

    def close(self) -> None:
        """Hangs up after a clean end; returns when the others have, too, or after a while."""
        for peer in self._peers:
            self._send(peer, {"bye": True})
        with self._changed:
            self._changed.wait_for(lambda: self._said_bye | self._hung_up >= {*self._peers}, _GRACE)
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(self, peer: int, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    if line.endswith("\n"):  # else cut off by a death
                        self._take(peer, json.loads(line))
        except OSError:
            pass  # reset, or given up by the kernel's probes: as good as closed
        with self._changed:
            self._hung_up.add(peer)
            self._changed.notify_all()
            clean = peer in self._said_bye
        if not clean:
            ending = Ending(peer, "died", 1, self.steps[peer])
            self._decide(ending) if self.index == 0 else self._finish(ending)

    def _take(self, peer: int, message: dict[str, Any]) -> None:
        if message.get("step") is not None:
            self.steps[peer] = message["step"]
        if "post" in message:
            self._collect(peer, message["post"], message["value"])
        elif "result" in message:
            self._deliver(message["result"], message["values"], message["steps"])
        elif "end" in message:
            ending = Ending(**message["end"])
            self._decide(ending) if self.index == 0 else self._finish(ending)
        elif "bye" in message:
            with self._changed:
                self._said_bye.add(peer)
                self._changed.notify_all()

    def _collect(self, peer: int, name: str, value: Any) -> None:
        with self._changed:
            posted = self._posted.setdefault(name, {})
            posted[peer] = value
            if len(posted) < self.count:
                return
            values = [self._posted[name][i] for i in range(self.count)]
            del self._posted[name]
        for other in self._peers:
            self._send(other, {"result": name, "values": values, "steps": self.steps})
        self._deliver(name, values, self.steps)

    def _deliver(self, name: str, values: list[Any], steps: list[int | None]) -> None:
        with self._changed:
            self.steps = [*steps[: self.index], self.steps[self.index], *steps[self.index + 1 :]]
            self._results[name] = values
            self._changed.notify_all()

    def _heard(self, ending: Ending) -> bool:
        """Whether this is the first cause that is heard of here."""
        with self._changed:
            first = self._ending is None
            if first:
                self._ending = ending
                self._changed.notify_all()
        return first

    def _decide(self, ending: Ending) -> None:
        """On process 0: the first cause is everyone's."""
        if self._heard(ending):  # apart: this may be the thread that hears the others hang up
            thread = threading.Thread(
                target=self._spread, args=(ending,), name="link-end", daemon=True
            )
            thread.start()

    def _spread(self, ending: Ending) -> None:
        for peer in self._peers:
            self._send(peer, {"end": dataclasses.asdict(ending)})
        # JAX aborts processes whose coordinator is gone, and process 0 is it: it goes last.
        with self._changed:
            rest = {*self._peers} - {ending.process}
            self._changed.wait_for(lambda: self._hung_up >= rest, _GRACE)
        self._on_end(ending)

    def _finish(self, ending: Ending) -> None:
        if self._heard(ending):
            self._on_end(ending)

    def _send(self, peer: int, message: dict[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        # Where it is gone, whoever listens to it will hear that.
        with contextlib.suppress(OSError), self._sending[peer]:
            self._peers[peer].sendall(line)


def probe(connection: socket.socket) -> None:
    """Has the kernel find out, within `VANISHED` seconds, that the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Silence is probed after a third of the time, then four times; the names are Linux'.
    options = {"TCP_KEEPIDLE": VANISHED // 3, "TCP_KEEPINTVL": VANISHED // 6, "TCP_KEEPCNT": 4}
    for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * VANISHED}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _some(numbers: list[int], most: int = 8) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
