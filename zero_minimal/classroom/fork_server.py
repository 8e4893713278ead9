"""Fork server: the process that forks a submission's ranks. It starts clean, in a sandbox, in a copy of the course
without answers, and never runs a submission itself.

    grade.py → judge (pytest, plugin.py) → fork server → ranks, which run the submission, and their hosts (hosts.py)
    trusted    trusted                     sandboxed     sandboxed, each with its own folder

The judge sends requests through a socket, each a line of JSON; a rank answers in the format of `results`. A rank gets
its work as a pickle, since the judge is trusted; nothing on the way back is ever unpickled. (A Connection sends by
write(), which the kernel counts.)
"""

import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

READY = b"ready\n"  # it can fork now
DATA = b"data"  # a rank's request for the secret of its data
HERE = b"here"  # a rank's first message: it has joined, and no line of the submission has run


def main(control: socket.socket, settings: dict) -> None:
    """Fork ranks and report how they ended, until the judge is gone."""
    from zero_minimal.classroom import hosts, sandbox

    os.setsid()
    sandbox.give_up_root(settings["python"], settings["runs"])
    sandbox.end_with_parent()  # afterwards, since a change of rights resets it
    sandbox.only_files(settings["readable"], [settings["runs"], "/dev/null"])
    os.environ["TMPDIR"] = tempfile.tempdir = settings["runs"]
    _get_ready()
    sys.path.append(settings["work"])  # last, so that a helper file hides no module
    control.sendall(READY)
    processes: set[int] = set()
    while True:
        request, descriptors, *_ = socket.recv_fds(control, 2**16, 4)
        if not request:
            os._exit(0)
        request = json.loads(request)
        if "start" in request:
            processes.add(answer := _fork(_rank, request["start"], control, *descriptors))
        elif "host" in request:
            processes.add(answer := _fork(hosts.host, request["host"], control, *descriptors))
        elif "anew" in request:  # a new judge: end all processes of the last one
            for process in processes:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            processes, answer = set(), request["anew"]
        else:
            _, status = os.waitpid(request["ended"], 0)
            processes.remove(request["ended"])
            answer = os.waitstatus_to_exitcode(status)
        control.sendall(json.dumps(answer).encode() + b"\n")


def _get_ready() -> None:
    """Import once what every rank needs; return freed memory at once, so that a rank's memory can be measured."""
    import ctypes
    import gc

    import checks  # noqa: F401
    import toys  # noqa: F401

    import zero_minimal.classroom.guard
    import zero_minimal.processes.warm  # noqa: F401

    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD of malloc.h
    gc.freeze()


def _fork(work: Callable, setup: dict, control: socket.socket, line: int, stacks: int, *others: int) -> int:
    process = os.fork()
    if process:
        for descriptor in (line, stacks, *others):
            os.close(descriptor)
        return process
    control.close()  # otherwise a submission could answer the judge through it
    try:
        _settle(setup, stacks)
        work(setup, Connection(line), *others)
    finally:
        os._exit(1)


def _settle(setup: dict, stacks: int) -> None:
    """Prepare a process that will run a submission: it ends with its parent, writes its stack on request or in a crash,
    and can write only into its own folder and the store in which ranks meet."""
    import checks

    from zero_minimal.classroom import sandbox

    sandbox.end_with_parent()
    checks.listen_in_threads()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    faulthandler.enable(file=stacks, all_threads=False)
    folder, store = f"{setup['folder']}/{setup['rank']}", f"{setup['folder']}/store"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    with open(store, "a"):
        pass
    sandbox.only_files(["/"], [folder, store, "/dev/null"])


def _rank(setup: dict, line: Connection) -> None:
    """A rank's life: join, get its work, do it, answer, and wait until every rank is done."""
    import torch.distributed as dist
    import toys

    from zero_minimal.classroom import hosts, results, sandbox
    from zero_minimal.offloading import host_process
    from zero_minimal.processes import failures, joining

    toys.secrets, toys.data_secrets = {setup["rank"]: setup["secret"]}, Asked(setup["rank"], line)
    host_process.lend = hosts.Lender(line)
    try:
        store = dist.FileStore(f"{setup['folder']}/store", setup["world_size"])
        joining.join(store, setup["rank"], setup["world_size"], "cpu", "gloo", timeout=setup["timeout"])
        sandbox.no_other_processes()
        line.send_bytes(HERE)
        function, args = pickle.loads(line.recv_bytes())
        answer = b"result\n" + results.encode(function(*args))
        joining.say_goodbye()
    except BaseException as error:  # also SystemExit: the judge must learn of it
        told = {"words": str(error) or type(error).__name__, "kind": type(error).__name__,
                "lost_a_peer": failures.lost_a_peer(error), "seconds": time.time()}
        answer = b"failure\n" + json.dumps(told).encode()
    line.send_bytes(answer)
    if answer.startswith(b"result"):  # after a failure, the others must see at once that we are gone
        line.recv_bytes()  # an earlier exit would close connections that the others still use
    os._exit(0)


class Asked(dict):
    """{rank: the secret of its data}, which the rank requests when it needs its first batch."""

    def __init__(self, rank: int, line: Connection):
        self.rank, self.line = rank, line

    def __missing__(self, rank: int) -> int:
        if rank != self.rank:
            raise KeyError(f"rank {self.rank} does not know the data of rank {rank}")
        self.line.send_bytes(DATA)
        self[rank] = int.from_bytes(self.line.recv_bytes(), "big")
        return self[rank]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
