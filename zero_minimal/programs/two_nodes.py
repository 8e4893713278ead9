"""Two nodes on one machine: two Linux network namespaces, and a cable of any speed between them.

    node 0, 10.0.0.1   eth0 ═══ 200 Mbit/s each way ═══ eth0   10.0.0.2, node 1

A process in one of them sees that cable, its own loopback, and no other network of this machine. The namespaces have no
names: this process holds them open. When it and its ranks end, even by a kill, namespaces and cable disappear. So
nothing is left behind, and two such pairs on one machine do not interfere.

    with two_nodes.Pair("200mbit") as pair:
        ranks.run(function, 2, before_join=pair.enter)            # rank 0 on node 0, rank 1 on node 1
        subprocess.Popen(command, preexec_fn=pair.on(1))          # any program, on node 1
        pair.cable("down")

It needs root, and `ip` and `tc` (the package iproute2).
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
ADDRESSES = ("10.0.0.1", "10.0.0.2")  # in a network that no other process sees
CARD = "eth0"  # the name of the cable's end on each node
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # bits a second
PACKET = 1514 / 1448  # bytes on the cable for each byte of ours, because of Ethernet, IP and TCP headers
QUEUE_MS = 50  # packets that wait longer at the cable's end are dropped, and sent again


def bits(speed: str) -> float:
    """Bits per second of "200mbit"; used to check a flag. Raises: argparse.ArgumentTypeError."""
    number, unit = re.fullmatch(r"([0-9.]*)(.*)", speed.strip().lower()).groups()
    with contextlib.suppress(ValueError, KeyError):
        if 1e6 <= (found := float(number) * UNITS[unit]) <= 1e11:
            return found
    raise argparse.ArgumentTypeError(f"{speed!r} is no speed of a link: write a number and its unit, as in 200mbit or "
                                     "2.5gbit (from 1mbit to 100gbit)")


def alone(row: dict, reference: float) -> str:
    """The time that a never idle cable needs for a rank's traffic in a step, as a multiple of `reference` seconds; ""
    if the traffic is unknown. row: from bench.py."""
    if row["wire_bytes_per_step"] is None:
        return ""
    return f"{8 * PACKET * row['wire_bytes_per_step'] / row['link_bits_per_second'] / reference:.3f}"


def why_not() -> str | None:
    """Why this machine cannot make two nodes; None if it can."""
    if not sys.platform.startswith("linux"):
        return "two nodes on one machine are two network namespaces, which Linux alone has"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"the command {' and '.join(missing)} is not here: install the package iproute2"
    try:
        with Pair("1gbit"):
            return None
    except PermissionError:
        return "two nodes on one machine need network namespaces, and those need root: start it with sudo, or in a " \
               "container with --cap-add NET_ADMIN,SYS_ADMIN"
    except (OSError, RuntimeError) as error:
        return f"this machine does not make network namespaces with a cable of a given speed: {error}"


def check(flags: argparse.Namespace) -> None:
    """Check the flags of bench with --link. Raises: ValueError if two nodes cannot be made."""
    if not flags.link:
        return
    if flags.sweep:
        raise ValueError("--link and --sweep exclude each other: several speeds of the link are a sweep of their own")
    if flags.device == "cuda":
        raise ValueError("--link is for ranks on the CPU: two nodes on one machine would share its GPUs")
    if flags.ranks % 2:
        raise ValueError(f"--link puts half of the ranks on each of two nodes: --ranks {flags.ranks} is odd")
    if reason := why_not():
        raise ValueError(f"--link does not work here: {reason}")
    flags.device = "cpu"


class Pair:
    """A context with two nodes. speed: of the cable, each way, as `bits` reads it.

    Raises: PermissionError without the right to make them; OSError or RuntimeError if the machine cannot make them.
    """

    def __init__(self, speed: str):
        self.rate, self.owner, self.nodes = f"{round(bits(speed))}bit", os.getpid(), []

    def __enter__(self) -> "Pair":
        try:
            self.nodes = [_new_namespace(), _new_namespace()]
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        while self.nodes:
            os.close(self.nodes.pop())

    def _connect(self) -> None:
        self._run(0, "ip", "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", self._path(1))
        for node, address in enumerate(ADDRESSES):
            self._run(node, "ip", "address", "add", f"{address}/24", "dev", CARD)
            for card in ("lo", CARD):
                self._run(node, "ip", "link", "set", card, "up")
            self._run(node, "tc", "qdisc", "add", "dev", CARD, "root", "tbf", "rate", self.rate, "burst", "128kb",
                      "latency", f"{QUEUE_MS}ms")

    def cable(self, state: str) -> None:
        """Unplug the cable ("down"), or plug it in again ("up"). Processes get no error: packets are lost."""
        self._run(0, "ip", "link", "set", CARD, state)

    def on(self, node: int) -> Callable[[], None]:
        """A preexec_fn for subprocess, which puts a new process on this node."""
        path = self._path(node)
        return lambda: _move(path)

    def visit(self, node: int, function: Callable):
        """Call function() on this node, in its own thread; return its result."""
        return _on_a_thread(function, self._path(node))

    def enter(self, rank: int, world_size: int) -> dict:
        """Put this process, a rank that has not joined yet, on its node: the first half of the ranks is on node 0.

        Returns options for joining.join.
        """
        if world_size % 2:
            raise ValueError(f"two nodes share an even number of ranks, not {world_size}")
        local = world_size // 2
        _move(self._path(rank // local))
        os.environ["GLOO_SOCKET_IFNAME"] = CARD
        return {"local_rank": rank % local, "local_world_size": local}

    def _path(self, node: int) -> str:
        return f"/proc/{self.owner}/fd/{self.nodes[node]}"

    def _run(self, node: int, *command: str) -> None:
        """Run a command on this node. Raises: RuntimeError if it fails."""
        done = self.visit(node, lambda: subprocess.run(command, capture_output=True, text=True))
        if done.returncode:
            raise RuntimeError(f"`{' '.join(command)}` says: {done.stderr.strip() or done.stdout.strip()}")


# Linux keeps a namespace as long as a thread is in it, or a process holds it open. A separate thread enters it, so that
# this process stays where it is.


def _new_namespace() -> int:
    """Make a new namespace; return a file descriptor that keeps it open."""
    return _on_a_thread(lambda: os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY), None)


def _on_a_thread(function: Callable, path: str | None):
    """Call function() on a thread in the namespace at `path`, or, for None, in a new one; return its result."""

    def there():
        if path is None:
            _call("unshare", NEW_NETWORK)
        else:
            _move(path)
        return function()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(there).result()


def _move(path: str) -> None:
    """Move this thread, and all that it will start, into a namespace."""
    with open(path) as namespace:
        _call("setns", namespace.fileno(), NEW_NETWORK)


def _call(name: str, *arguments: int) -> None:
    """One of the two system calls that Python has only since 3.12. Raises: OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
