"""Host process: a process beside each rank, which keeps what the rank has no room for.

The server that forked the rank (ranks.py), with one thread and no locks, forks it, too. A rank of
torchrun has no such server, and starts a new Python; a rank in a notebook starts a server. Rank and
host share the buffers (host_link.py), and each sees when the other ends:

    the rank ends, in any way  its host process says so, and ends too
    the host process ends      the rank says so, and fails when it next uses the bus; if it does not
                               use it for some seconds, it ends

Their memory and their pipe have no name, in /dev/shm or elsewhere, so nothing can stay behind.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import forkserver, reduction

import cloudpickle
import torch
import torch.distributed as dist

from zero_minimal.offloading import host_link
from zero_minimal.offloading.host_link import Bus, NotSent, OtherSideGone, Parcel
from zero_minimal.offloading.pinned_link import PinnedBus
from zero_minimal.processes import interrupts, joining, ranks

GRACE = 0.2  # seconds in which the host may still read "end"
PATIENCE = 5  # seconds in which a rank may fail by itself
# the host ignores these: the rank may want to save before it ends, and needs the host for that
THE_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WATCH = "watches the host"  # the name of a rank's thread, while a host runs

_open: weakref.WeakSet["Host"] = weakref.WeakSet()

# set if a rank may start no process itself: (size, setup, serve) → process, connection, descriptor
# of the bus's memory, as _new_process() returns them
lend: Callable | None = None

# set if a rank's tensors have no values: (size of a buffer) → its end of a bus to a host in this
# process (simulated_host.py)
here: Callable | None = None

many = False  # whether this process starts hosts again and again: then it uses its own server


class HostError(RuntimeError):
    """The host has raised, or is gone."""


INTERRUPTED = ("zero.step(), or something else that used the bus, was interrupted: rank and host "
               "no longer agree. Build the stage anew and load the newest checkpoint")


class Host:
    """The rank's view of its host: a bus, and the process or thread at its other end.

    Args:
        serve: function(bus), what the host does; it returns when it is told "end".
        largest: bytes of the largest tensor that crosses often: the size of a buffer.
        device: where the rank computes. bandwidth: of the bus, as Bus takes it.
    """

    def __init__(
        self, serve: Callable, largest: int, device: torch.device, bandwidth: float | None
    ):
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ended = False  # on purpose
        self.told = False  # whether the rank knows that its host is gone
        self.parted: str | None = None  # why rank and host no longer agree
        self.shards = 0  # how many parcels come back from an update
        self.pid = os.getpid()  # a forked child has the object, too, but no host
        self.words = f"the host process of rank {self.rank} is gone"
        self.gone = threading.Event()
        # owed: those parcels that are not emptied yet. takes_all: the method that receives them all
        # (a weak reference: a host does not keep its stage alive)
        self.owed, self.takes_all = 0, None
        start = self._start_thread if device.type == "cuda" else self._start_process
        start = self._start_here if here else start
        start(serve, host_link.buffer_bytes(largest), device, bandwidth)
        _open.add(self)
        _end_with_process()

    def send(self, words: tuple, tensor: torch.Tensor | None = None) -> None:
        if tensor is not None or self.takes_all is None:
            self.settle()  # else each side could wait for the other to empty a buffer
        with self.together():
            self.bus.send(words, tensor)
            if words[0] == "update":
                self.owed = self.shards

    def receive(self) -> Parcel:
        with self.together():
            parcel = self.bus.receive()
            self._hear(parcel.words)
        return parcel

    def settle(self) -> None:
        """Receive what is on its way to the rank: then the bus is free for something else. If
        parcels are left, the code that received them was interrupted."""
        take_all = self.takes_all and self.takes_all()
        if take_all:
            take_all()
        if self.owed:
            self.part(f"parcels of the last update were not emptied: {INTERRUPTED}")

    def ask(self, *words) -> object:
        """Send words, and return the answer."""
        self.settle()
        with self.together():
            self.send(words)
            return self.receive().words[0]

    def emptied(self, parcel: Parcel) -> None:
        with self.together():
            self.bus.emptied(parcel)
            self.owed = max(0, self.owed - 1)

    def send_all(self, tensor: torch.Tensor) -> None:
        self.settle()
        with self.together():
            self.bus.send_all(tensor)

    def receive_all(self, into: torch.Tensor) -> torch.Tensor:
        self.settle()
        with self.together():
            self.bus.receive_all(into)
        return into

    def part(self, words: str) -> None:
        """Rank and host no longer agree: end the host. Each later use raises these words."""
        self.parted = self.parted or words
        self.end()

    def end(self) -> None:
        """End the host, if it has not ended."""
        if os.getpid() != self.pid:
            return  # it is the parent's host
        self.ended = True
        with contextlib.suppress(OtherSideGone):
            if not self.parted:
                self.bus.send(("end",))
                while self.owed > 0:  # the host can only end once these have crossed
                    self.owed -= 1
                    self.bus.drop()
        self.bus.close()
        _open.discard(self)

    @contextlib.contextmanager
    def together(self):
        """Context of an exchange that both sides must complete. If it is interrupted they no longer
        agree: half a message may have been sent, or an answer may be on its way that nobody takes.
        Raises: HostError if the host is gone, and in each exchange after an interrupted one."""
        if os.getpid() != self.pid:
            raise HostError(f"the host of rank {self.rank} is that of process {self.pid}: a forked "
                            "child has none. Use the stage in the process that has made it")
        if self.parted:
            raise HostError(self.parted)
        try:
            yield
        except OtherSideGone:
            for words in self.bus.last_words():
                self._hear(words)
            self.gone.wait(1)  # for the words of _watch
            self.told = True
            raise HostError(f"{self.words}, and with it the optimizer state that it kept: go on "
                            "from the newest checkpoint") from None
        except HostError:
            raise
        except NotSent:
            raise  # and nothing else has changed
        except BaseException:
            self.part(INTERRUPTED)
            raise

    def _hear(self, words: tuple) -> None:
        if words[:1] == ("failed",):
            self.told = True
            raise HostError(f"the host of rank {self.rank} failed:\n{words[1]}")

    def _watch(self, process) -> None:
        """Say that the host process has ended, if nobody told it to."""
        process.join()
        if self.ended:
            return
        if process.exitcode == 0:  # it has sent its error: the next use of the bus raises that
            self.gone.set()
            return
        if process.exitcode < 0:
            self.words += f" (killed by {signal.Signals(-process.exitcode).name})"
        print(self.words, file=sys.stderr, flush=True)
        self.gone.set()
        time.sleep(PATIENCE)
        if not self.told:
            os._exit(1)

    # ---------------------------------------------------------------------------- how it is started

    def _start_process(self, serve, size, device, bandwidth):
        setup = dict(rank=self.rank, size=size, bandwidth=bandwidth,
                     threads=torch.get_num_threads(),
                     default_dtype=torch.get_default_dtype())
        self.process, pipe, number = (lend or _new_process)(size, setup, serve)
        threading.Thread(
            target=self._watch, args=(self.process,), daemon=True, name=WATCH
        ).start()
        self.bus = Bus(host_link.Words(pipe), host_link.memory_of(number, size), 0, bandwidth)

    def _start_here(self, serve, size, device, bandwidth):
        self.process, self.bus = None, here(size)

    def _start_thread(self, serve, size, device, bandwidth):
        self.process = None
        if bandwidth is not None:
            raise ValueError("bus= is for ranks on CPUs: with a GPU the bus is a real one, and has "
                             "the speed that it has; leave bus= out")
        ours, theirs = host_link.Queues.pair()
        memory = torch.zeros(2, host_link.BUFFERS, size, dtype=torch.uint8, device="cpu",
                             pin_memory=True)
        self.bus = PinnedBus(ours, memory, 0, device)
        there = PinnedBus(theirs, memory, 1, device)
        threading.Thread(target=_serve, args=(serve, there), daemon=True).start()


def end_all() -> None:
    """End all hosts: the rank has done its work."""
    for host in list(_open):
        host.end()


joining.before_the_end(end_all)
_will_end: set[int] = set()  # ids of processes: a forked one has none of its parent's hooks


def _end_with_process() -> None:
    """End hosts before multiprocessing kills this process's children, and Python its threads."""
    if os.getpid() not in _will_end:
        _will_end.add(os.getpid())
        multiprocessing.util.Finalize(None, _end_and_wait, exitpriority=100)


def _leave_to_parent() -> None:
    """In a forked child: otherwise multiprocessing would end the parent's hosts when it ends."""
    for host in list(_open):
        multiprocessing.process._children.discard(host.process)


os.register_at_fork(after_in_child=_leave_to_parent)


def _end_and_wait() -> None:
    end_all()
    until = time.monotonic() + PATIENCE
    for thread in threading.enumerate():
        if thread.name == WATCH:
            thread.join(max(0.0, until - time.monotonic()))


def _new_process(size: int, setup: dict, serve: Callable) -> tuple:
    """A host process, a connection to it, and a descriptor of the memory that both see."""
    if multiprocessing.current_process().daemon:
        raise RuntimeError("a daemonic process can start no host: start the rank with daemon=False")
    ours, theirs = multiprocessing.Pipe()
    process = _context().Process(
        target=_main, args=(theirs, setup, cloudpickle.dumps(serve)), daemon=True
    )
    with ranks.main_hidden(), interrupts.held_off(THE_RANKS):  # until the host ignores them
        process.start()
    theirs.close()
    number = host_link.shared_file(size)
    reduction.send_handle(ours, number, process.pid)
    return process, ours, number


def _context():
    """A context that starts a process without the locks of this one's threads."""
    server = forkserver._forkserver
    if server._forkserver_address is None:
        return multiprocessing.get_context("forkserver" if many else "spawn")
    if server._forkserver_pid is None:
        # it was inherited from the process that asked for the ranks. Python's own ensure_running()
        # would start another server, although it says otherwise
        server.ensure_running = lambda: None
    return multiprocessing.get_context("forkserver")


# ------------------------------------------------------------------------------ in the host process


def _main(pipe, setup: dict, pickled: bytes) -> None:
    for number in THE_RANKS:
        signal.signal(number, signal.SIG_IGN)
    _end_with_rank(setup["rank"])
    torch.set_num_threads(setup["threads"])  # sums are in the same order as on the rank,
    torch.set_default_dtype(setup["default_dtype"])  # and what an optimizer makes has its dtype
    number = reduction.recv_handle(pipe)
    memory = host_link.memory_of(number, setup["size"])
    serve = pickle.loads(pickled)
    _serve(serve, Bus(host_link.Words(pipe), memory, 1, setup["bandwidth"]))
    sys.stderr.flush()
    os._exit(0)


def _serve(serve: Callable, there: Bus) -> None:
    try:
        serve(there)
    except OtherSideGone:
        time.sleep(1)  # _end_with_rank prints the reason
    except BaseException:
        with contextlib.suppress(OtherSideGone):
            there.send(("failed", traceback.format_exc()))
    finally:
        there.close()


def _end_with_rank(rank: int) -> None:
    """A host never outlives its rank, even while it computes or waits for the bus."""
    parent = multiprocessing.parent_process()

    def watch():
        multiprocessing.connection.wait([parent.sentinel])
        time.sleep(GRACE)  # the rank may have said "end" before
        print(f"rank {rank} is gone: its host process ends, too", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
