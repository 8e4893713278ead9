"""Pool: ranks that stay, for thousands of programs. New ones would take longer to start than a program runs."""

import contextlib
import datetime
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
from fuzzing.loop import OneProcess, Rank, play
from house.scenarios.plain import play_in_turn
from house.scenarios.stand import _leave

from zero_minimal.processes import interrupts, joining, ranks

TESTS = Path(__file__).parents[1]
PATIENCE = datetime.timedelta(seconds=20)  # for ranks that wait for each other
LONGEST = 60  # seconds; after them the ranks are ended
RENEWALS = 10  # of the group; a group that ranks have left in an error keeps a thread of gloo's busy


class Hung(Exception):
    """Ranks that did not come to an end."""


class Pools:
    """Ranks that wait for programs, a few for each size of the world; a context."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        self.pools = {}
        return self

    def __exit__(self, *_):
        for pool in self.pools.values():
            pool.end()

    def play(self, program: dict, stage: str) -> list:
        """An Outcome a rank. Raises: Hung; then new ranks have been started."""
        size = program["world"]
        if size not in self.pools:
            self.pools[size] = Pool(size)
        return self.pools[size].play(program, stage)


class Pool:
    """So many ranks."""

    def __init__(self, size: int):
        self.size = size
        self.start()

    def start(self):
        self.folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fuzzing.loop", "zero_minimal.processes.warm"])
        self.pipes, self.processes = [], []
        with contextlib.chdir(TESTS), ranks.main_hidden(), interrupts.held_off():  # where it looks for fuzzing.loop
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, self.size, self.folder), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        self.renew, self.renewals = True, 0

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def play(self, program: dict, stage: str) -> list:
        if self.renew and self.renewals == RENEWALS:
            self.end()
            self.start()
        if self.renew:
            self._ask("renew")
            self.renewals += 1
        outcomes = self._ask((program, stage))
        failed = [bool(outcome.error) for outcome in outcomes]
        self.renew = all(failed)
        if any(failed) and not all(failed):  # they are in different places
            self.end()
            self.start()
        return outcomes

    def _ask(self, what) -> list:
        answers, waiting, deadline = {}, dict(zip(self.pipes, range(self.size), strict=True)), time.time() + LONGEST
        try:
            for pipe in self.pipes:
                pipe.send(what)
            while waiting:
                ready = connection.wait(list(waiting), max(0, deadline - time.time()))
                if not ready:
                    raise Hung(f"ranks {list(waiting.values())} did not end")
                for pipe in ready:
                    answers[waiting.pop(pipe)] = pipe.recv()
        except (Hung, EOFError, OSError) as error:
            self.end()
            self.start()
            raise Hung(f"{type(error).__name__}: {error}") from None
        return [answers[rank] for rank in range(self.size)]


def plainly(program: dict) -> list:
    """What plain PyTorch comes to, in this process: an Outcome a rank."""
    return play_in_turn(lambda turn: play(program, OneProcess(turn)), program["world"])


def _serve(pipe, rank: int, size: int, folder: str) -> None:
    """In a rank: play what comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    joining.join(dist.FileStore(f"{folder}/store", size), rank, size, "cpu", timeout=LONGEST)
    if hasattr(os, "SCHED_OTHER"):  # here messages are small and many, and a rank that waits its turn for each is slow
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    group, number = None, 0
    gc.freeze()
    with contextlib.suppress(EOFError):
        while (task := pipe.recv()) is not None:
            if task == "renew":
                group = dist.new_group(timeout=PATIENCE)
                pipe.send("renewed")
                continue
            program, stage = task
            number += 1
            outcome = play(program, Rank(stage, group, f"{folder}/saved{number}"))
            if outcome.error:
                _leave(group)
            if number % 5 == 0:  # it takes a fifth of the time of a program
                gc.collect()
            if rank == 0:
                shutil.rmtree(f"{folder}/saved{number}", ignore_errors=True)
            pipe.send(outcome)
    os._exit(0)
