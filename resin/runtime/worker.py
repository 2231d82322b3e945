"""Ranks: processes that run one program together. Rank 0 plans, the others take its steps in order.

JAX joins the devices (`jax.distributed`, at the coordinator's port); steps travel over a connection of each worker with
rank 0, at the next port. Frames are a tag of one byte and bytes: text, or a message of `resin.plan.wire`. Whoever
connects must tell the digest of its code and options, and nothing that comes is ever executed; but nothing is
encrypted: both ports belong to a private network.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import jax

from resin.plan import ArenaSpec, BatchPlan, InvalidRequest, ResinError, StepPlan, wire
from resin.runtime.executable import StepOutput
from resin.runtime.program_cache import source_digest
from resin.runtime.results import StepHandle
from resin.runtime.runner import ModelRunner
from resin.topology import Launch

BEAT_S = 0.5
"""A rank that has nothing to say says so this often."""

SILENCE_S = 4.0
"""A rank that says nothing for so long hangs, or its machine does."""

GATHER_S = 300.0
"""How long ranks wait for each other at the start."""

_MOST_HELLO_BYTES = 4096
_LOG = logging.getLogger("resin.ranks")


class RankLost(ResinError):
    """Another rank has ended, hangs, or does not fit: no further step can run."""


class Tag(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    BEAT = 4
    BIND = 5
    STEP = 6
    RELEASE = 7
    END = 8
    FAULT = 9


def digest_of(*told: Any) -> str:
    """A digest of this package's code, JAX's version and what is told (options, a model's config)."""
    digest = hashlib.sha256(source_digest().encode())
    for part in (jax.__version__, wire.VERSION, *told):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _address(launch: Launch) -> tuple[str, int]:
    assert launch.coordinator is not None
    host, _, port = launch.coordinator.rpartition(":")
    return host, int(port) + 1


def _frame(tag: Tag, content: bytes = b"") -> bytes:
    return bytes((tag,)) + content


def _receive(connection: Connection, most_bytes: int | None = None) -> tuple[Tag, bytes]:
    data = connection.recv_bytes(most_bytes)
    try:
        return Tag(data[0]), data[1:]
    except (IndexError, ValueError):
        raise OSError("a frame that nobody knows") from None


class Ranks:
    """Rank 0's hold on the others: a runner that leads tells them all that it does.

    Args:
        launch: the processes.
        digest: what every rank's must equal (`digest_of`).

    Raises:
        InvalidRequest: the coordinator's next port cannot be listened on.
    """

    def __init__(self, launch: Launch, digest: str) -> None:
        self.failure: RankLost | None = None
        self.on_lost: Callable[[RankLost], None] = lambda error: None
        self._launch = launch
        self._digest = digest
        self._connections: dict[int, Connection] = {}
        self._heard_s: dict[int, float] = {}
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ends = False
        address = _address(launch)
        try:
            self._listener = Listener(address, backlog=launch.processes)
        except OSError as error:
            reason = f"a host of this machine whose ports are free ({address[1]}: {error.strerror or error})"
            raise InvalidRequest("coordinator", launch.coordinator, reason) from error
        threading.Thread(target=self._accept, name="resin-ranks-accept", daemon=True).start()

    def gather(self, timeout_s: float = GATHER_S) -> None:
        """Waits for all ranks, and watches them from then on.

        Raises:
            RankLost: one does not come, or is another program's.
        """
        with self._changed:
            wanted = self._launch.processes - 1
            self._changed.wait_for(lambda: self.failure is not None or len(self._connections) == wanted, timeout_s)
            missing = sorted(set(range(1, self._launch.processes)) - set(self._connections))
            if self.failure is None and missing:
                self.failure = RankLost(f"no word of ranks {missing} within {timeout_s:.0f} s")
        if self.failure is not None:
            self.close()
            raise self.failure
        self._heard_s = dict.fromkeys(self._connections, time.monotonic())
        for target in (self._watch, self._send):
            threading.Thread(target=target, name=f"resin-ranks{target.__name__}", daemon=True).start()

    def make_runner(self, *arguments: Any, **named: Any) -> LeadingRunner:
        """A runner that leads these ranks: `make` of `load_runner`."""
        return LeadingRunner(*arguments, ranks=self, **named)

    def bound(self, runner: ModelRunner, arena: ArenaSpec) -> None:
        """The runner has this arena now."""
        self._tell(Tag.BIND, wire.encode_config(runner.config, arena))

    def stepped(self, step: StepPlan) -> None:
        """The runner starts a step. Its bytes are made at once, and are on their way while it runs."""
        self._tell(Tag.STEP, wire.encode_step(step))

    def released(self) -> None:
        """The runner is not bound any more."""
        if self.failure is None:
            self._tell(Tag.RELEASE)

    def wait(self, results: Sequence[jax.Array]) -> None:
        """Waits for results as long as all ranks are there.

        Raises:
            RankLost: one is not.
        """
        while not all([result.is_ready() for result in results]):  # type: ignore[attr-defined]
            self.check()
            time.sleep(0.0001)

    def check(self) -> None:
        """Raises RankLost if a rank is lost."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Lets the others end."""
        if self._ends:
            return
        self._ends = True
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self._listener.close()
        if self.failure is not None:
            for connection in self._connections.values():
                connection.close()

    def _tell(self, tag: Tag, content: bytes = b"") -> None:
        self.check()
        self._outgoing.put(_frame(tag, content))

    def _accept(self) -> None:
        while not self._ends:
            try:
                connection = self._listener.accept()
            except OSError:
                continue
            try:
                self._greet(connection)
            except (EOFError, OSError, ValueError, KeyError, TypeError):
                connection.close()

    def _greet(self, connection: Connection) -> None:
        if not connection.poll(SILENCE_S):
            raise OSError("no hello")
        tag, content = _receive(connection, _MOST_HELLO_BYTES)
        hello = json.loads(content)
        rank, is_other = int(hello["rank"]), hello["digest"] != self._digest
        reason = None
        with self._changed:
            if tag is not Tag.HELLO or rank not in range(1, self._launch.processes):
                reason = f"rank {rank}: expected 1 to {self._launch.processes - 1}"
            elif rank in self._connections:
                reason = f"rank {rank} is here already"
            elif is_other:
                reason = f"rank {rank} runs other code, options or model than rank 0"
                self.failure = RankLost(reason)
            else:
                self._connections[rank] = connection
            self._changed.notify_all()
        connection.send_bytes(_frame(Tag.WELCOME) if reason is None else _frame(Tag.REFUSED, reason.encode()))
        if reason is not None:
            _LOG.error("refused: %s", reason)
            connection.close()

    def _send(self) -> None:
        while True:
            try:
                frame = self._outgoing.get(timeout=BEAT_S)
            except queue.Empty:
                frame = _frame(Tag.BEAT)
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # whoever watches finds out
                    connection.send_bytes(frame if frame is not None else _frame(Tag.END))
            if frame is None:
                return

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while not self._ends:
            try:
                for connection in wait(list(ranks), BEAT_S):
                    assert isinstance(connection, Connection)
                    rank = ranks[connection]
                    tag, content = _receive(connection)
                    if tag is Tag.FAULT:
                        return self._lose(f"rank {rank} failed: {content.decode(errors='replace')}")
                    self._heard_s[rank] = time.monotonic()
            except (EOFError, OSError):
                return self._lose(f"rank {rank} has ended")
            for rank, heard_s in self._heard_s.items():
                if time.monotonic() - heard_s > SILENCE_S:
                    return self._lose(f"rank {rank} has said nothing for {SILENCE_S:.0f} s")

    def _lose(self, reason: str) -> None:
        if self._ends:
            return
        self.failure = RankLost(reason)
        _LOG.critical("%s", reason)
        self.on_lost(self.failure)


class LeadingRunner(ModelRunner):
    """Rank 0's runner: what it is bound to and runs, all ranks are and run.

    On CPU, a process of several devices runs one step after the other: collectives of steps that are queued there wait
    for each other for ever.
    """

    def __init__(self, *arguments: Any, ranks: Ranks, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._ranks = ranks
        self._last: Sequence[jax.Array] = ()

    def bind(self, arena: ArenaSpec) -> None:
        super().bind(arena)
        self._ranks.bound(self, arena)

    def unbind(self) -> None:
        if self._ranks.failure is not None:
            self._state.abandon()
        self._ranks.released()
        super().unbind()

    def launch(self, plan: BatchPlan | StepPlan) -> StepOutput:
        self._ranks.wait(self._last)
        self._ranks.stepped(StepPlan.of(plan))
        output = super().launch(plan)
        self._last = (output.token_ids,) if is_serial(self) else ()
        return output

    def collect(self, handle: StepHandle) -> Any:
        self._ranks.wait(handle.results)
        return super().collect(handle)


def is_serial(runner: ModelRunner) -> bool:
    """Whether steps of several processes must not be queued."""
    return runner.device.platform == "cpu" and jax.local_device_count() > 1


class Worker:
    """A rank that follows rank 0.

    Args:
        launch: the processes, of which this is not the first.
        digest: as of `Ranks`.
        timeout_s: how long rank 0 may take to appear.

    Raises:
        RankLost: rank 0 is not there, or refuses this one.
    """

    def __init__(self, launch: Launch, digest: str, *, timeout_s: float = GATHER_S) -> None:
        self._connection = _connect(launch, timeout_s)
        self._sending = threading.Lock()
        self._frames: queue.SimpleQueue[tuple[Tag, bytes] | RankLost] = queue.SimpleQueue()
        self.on_lost: Callable[[RankLost], None] = lambda error: None
        hello = {"rank": launch.rank, "digest": digest}
        try:
            self._connection.send_bytes(_frame(Tag.HELLO, json.dumps(hello).encode()))
            if not self._connection.poll(SILENCE_S):
                raise RankLost("rank 0 does not answer")
            tag, content = _receive(self._connection)
        except (EOFError, OSError) as error:
            raise RankLost(f"rank 0 does not answer: {error}") from error
        if tag is not Tag.WELCOME:
            raise RankLost(f"rank 0 refuses: {content.decode(errors='replace')}")
        self._is_over = False
        threading.Thread(target=self._listen, name="resin-rank-listen", daemon=True).start()
        threading.Thread(target=self._beat, name="resin-rank-beat", daemon=True).start()

    def follow(self, runner: ModelRunner) -> None:
        """Runs what rank 0 runs, until that ends.

        Raises:
            RankLost: it is gone without a word.
        """
        try:
            self._follow(runner)
        except RankLost:
            raise
        except BaseException as error:
            self._say(Tag.FAULT, f"{type(error).__name__}: {error}".encode())
            raise

    def _follow(self, runner: ModelRunner) -> None:
        while True:
            frame = self._frames.get()
            if isinstance(frame, RankLost):
                raise frame
            tag, content = frame
            if tag is Tag.BIND:
                config, arena = wire.decode_config(content)
                if config != runner.config:
                    raise RankLost("rank 0 has another runner config")
                runner.bind(arena)
                runner.warm_up(measures=False)
            elif tag is Tag.STEP:
                output = runner.launch(wire.decode_step(content, runner.config))
                if is_serial(runner):
                    jax.block_until_ready(output.token_ids)
            elif tag is Tag.RELEASE:
                runner.unbind()
            elif tag is Tag.END:
                self._is_over = True
                return

    def _listen(self) -> None:
        """Apart from the steps, which may never end when rank 0 is gone."""
        error = None
        while error is None:
            try:
                if not self._connection.poll(SILENCE_S):
                    error = RankLost(f"rank 0 has said nothing for {SILENCE_S:.0f} s")
                    break
                tag, content = _receive(self._connection)
            except (EOFError, OSError):
                error = RankLost("rank 0 has ended")
                break
            if tag is not Tag.BEAT:
                self._frames.put((tag, content))
            if tag is Tag.END:
                return
        self._frames.put(error)
        self.on_lost(error)

    def _beat(self) -> None:
        while not self._is_over:
            self._say(Tag.BEAT)
            time.sleep(BEAT_S)

    def _say(self, tag: Tag, content: bytes = b"") -> None:
        with self._sending, contextlib.suppress(OSError):  # whoever listens finds out
            self._connection.send_bytes(_frame(tag, content))


def _connect(launch: Launch, timeout_s: float) -> Connection:
    address, started_s = _address(launch), time.monotonic()
    while True:
        try:
            return Client(address)
        except OSError as error:
            if time.monotonic() - started_s > timeout_s:
                raise RankLost(f"rank 0 is not at {address[0]}:{address[1]}: {error.strerror or error}") from error
            time.sleep(0.1)
