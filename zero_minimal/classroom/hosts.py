"""Hosts: processes that keep what does not fit on the ranks that run a submission (lesson 09).

A rank may not start processes or share memory. So it asks the judge, which creates both: it lets the fork server fork
the host:

    rank ── "host", bytes ──► judge ── fork ──► fork server ──► host, in the same sandbox
         ◄── a line to the host, and the memory of the bus ──

Then rank and host communicate directly. The judge treats the host like the rank: it asks for its stack, counts its
memory, and ends it.
"""

import os
import pickle
import socket
from multiprocessing.connection import Connection

import cloudpickle

from zero_minimal.offloading import host_link

REQUEST = b"host"  # a rank's request, followed by the size of a buffer
MOST_BYTES, MOST_HOSTS = 2**26, 64  # per buffer; per rank


# ------------------------------------------------------------------------------------------------------------ in a rank


class Lender:
    """Replaces starting a process in offloading/host_process.py.

    line: from the rank to the judge. submission: its file is also run by the host.
    """

    def __init__(self, line: Connection):
        self.line, self.submission = line, None

    def __call__(self, size: int, setup: dict, serve) -> tuple["LentProcess", Connection, int]:
        """A host's process, a connection to it, and a descriptor of the bus's memory."""
        self.line.send_bytes(REQUEST + size.to_bytes(8, "big"))
        with socket.fromfd(self.line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
            _, descriptors, *_ = socket.recv_fds(line, 1, 3)
        if len(descriptors) != 3:
            raise RuntimeError(f"no more than {MOST_HOSTS} hosts a rank, of {MOST_BYTES // 2**20} MB a buffer")
        line, ends, memory = descriptors
        connection = Connection(line)
        connection.send_bytes(pickle.dumps(self.submission))
        connection.send_bytes(cloudpickle.dumps((setup, serve)))
        return LentProcess(ends), connection, memory


class LentProcess:
    """A process whose end can be waited for."""

    pid, exitcode = None, 0

    def __init__(self, ends: int):
        self.ends = ends

    def join(self) -> None:
        os.read(self.ends, 1)  # the other end closes when the process ends
        os.close(self.ends)


# ------------------------------------------------------------------------------------------------------------ in a host


def host(setup: dict, connection: Connection, ends: int, memory: int) -> None:
    """The work of a host, which the fork server has forked. It never returns."""
    import toys

    from zero_minimal.classroom import sandbox
    from zero_minimal.classroom.guard import guarded

    try:
        os.set_inheritable(ends, False)
        sandbox.no_other_processes()
        toys.secrets = {}
        submission = pickle.loads(connection.recv_bytes())
        there = {}

        def run():
            submission.load()  # it may define `serve`
            told, serve = pickle.loads(connection.recv_bytes())
            buffers = host_link.memory_of(memory, told["size"])
            there["bus"] = host_link.Bus(host_link.Words(connection), buffers, 1, told["bandwidth"])
            serve(there["bus"])

        try:
            guarded(run, submission, host=True)()
        except host_link.OtherSideGone:
            pass
        except BaseException as error:
            if "bus" in there:
                there["bus"].send(("failed", str(error)))
    finally:
        os._exit(0)
