"""Submissions that do more than be wrong: they hang, crash, print, kill, cheat. Written into lesson 3's step()."""

from submissions import Wrong, function, mistakes

from zero_minimal.classroom.lessons import found

step = mistakes(found()["03_gradients"]).step


def in_step(*lines, rank=None):
    """These lines at the beginning of step(), on one rank or on all."""
    return step("\n".join(lines) if rank is None else function(f"if self.rank == {rank}:", *lines))


def caught(message, code, step=2, check="test_every_rank_has_all_updated_parameters", world_size=2, hangs=False):
    return Wrong(step, check, message, code, world_size, hangs)


def at_the_top(message, *lines):
    """These lines before all others of the file."""
    return Wrong(1, "test_shards_hold_the_mean_gradient", message, {}, 2, top="\n".join(lines) + "\n")


WRONG = {
    "loops for ever": caught(
        r"(?s)rank 0 waited in wait, at line \d+ of assignment.py \(step\): pending.wait\(\)"
        r".*rank 1 stood at line \d+ of assignment.py \(step\): while True: pass",
        in_step("while True: pass", rank=1), hangs=True),
    "is slow on one rank": caught(
        r"(?s)rank 1 stood at line \d+ of assignment.py \(step\): import time; time.sleep\(99\)"
        r".*waited for nobody: it is slow .* or in a loop",
        in_step("import time; time.sleep(99)", rank=1), hangs=True),
    "has not finished a branch": caught(
        r"rank 1: a branch is not finished: line \d+ in step raises NotImplementedError \(later\)$",
        in_step("raise NotImplementedError('later')", rank=1)),
    "one rank calls another collective": caught(
        r"(?s)had not come to an end.*rank 0 waited in all_reduce, at line \d+|it raised RuntimeError",
        in_step("torch.distributed.all_reduce(torch.zeros(1))", rank=0), hangs=True),
    "gathers in another order on each rank": caught(
        r"parameters differ|had not come to an end|it raised|do all ranks call the same collectives in the same order",
        step(buckets="self.buckets[:: 1 - 2 * self.rank]")),
    "raises on one rank": caught(
        r"(?s)rank 1: it raised ValueError: oh.*line \d+ in step: raise ValueError",
        in_step("raise ValueError('oh')", rank=1)),
    "leaves without a word": caught(
        r"rank 1 is gone in the middle of the test: it ended with exit code 0",
        in_step("import os; os._exit(0)", rank=1)),
    "crashes": caught(
        r"rank 1 is gone in the middle of the test: it was killed by SIGSEGV at line \d+ of "
        r"assignment.py \(step\): .*raise_signal.*\n    To look at: .* view of a freed",
        in_step("import signal; signal.raise_signal(signal.SIGSEGV)", rank=1)),
    "calls sys.exit": caught(
        r"rank 1: it ended the program: sys.exit\(0\)", in_step("raise SystemExit(0)", rank=1)),
    "kills another process": caught(
        r"it did what is denied to a submission .*signal them", in_step("import os; os.kill(os.getppid(), 9)", rank=1)),
    "kills where Python does not see it": caught(
        r"it did what is denied to a submission .*signal them",
        in_step("import os, signal, time; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)", "time.sleep(0.5)",
                rank=1)),
    "prints without end": caught(
        r"(?s)it printed more than 1 MB.*while True: print", in_step("while True: print('again' * 99)", rank=0)),
    "leaves a thread": caught(
        r"1 of its threads still run when the test is over",
        in_step("import threading, time", "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()")),
    "starts a program": caught(
        r"it did what is denied to a submission .*it may not start other processes",
        in_step("import subprocess; subprocess.Popen(['sleep', '99'])", rank=1)),
    "forks": caught(r"it did what is denied to a submission .*start other", in_step("import os; os.fork()")),
    "takes all memory": caught(
        r"it asked for more than 4 GB of memory", in_step("hoard = [bytes(2**30) for _ in range(99)]", rank=0)),
    "imports the reference": at_the_top(
        r"it imports zero_minimal.stage2, where the work of lesson 03_gradients is done already",
        "from zero_minimal.stage2 import Stage2 as Theirs"),
    "imports it by its name": at_the_top(
        r"it imports .*stage2|No module named .zero_minimal.stage2",
        "import importlib", "importlib.import_module('zero_minimal.stage2')"),
    "imports another stage, and hides that it failed": at_the_top(
        r"it imports zero_minimal.stage3", "try:", "    import zero_minimal.stage3", "except BaseException:",
        "    pass"),
    "writes into the tests": caught(
        r"it did what is denied to a submission .*nor read or write outside of its own folder",
        in_step("import sys; open(sys.modules['checks'].__file__, 'r+')")),
    "measures no memory": caught(
        r"it replaced checks.live_bytes", in_step("import sys",
                                                  "sys.modules['checks'].live_bytes = lambda *args, **kwargs: 0")),
    "rewrites how memory is measured": caught(
        r"it replaced checks.live_bytes",
        in_step("import sys", "sys.modules['checks'].live_bytes.__code__ = (lambda until=0: 0).__code__")),
    "hides its tensors": caught(r"it replaced gc.get_objects", in_step("import gc; gc.get_objects = list")),
    "replaces a collective": caught(
        r"it replaced torch.distributed.*all_gather", in_step("torch.distributed.all_gather = print")),
    "replaces a method of tensors": caught(r"it replaced torch.Tensor.*", in_step("torch.Tensor.backward = print")),
    "has no class of that name": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"the file has no Stage2", {"Stage2": None}, 2),
    "cannot be imported": at_the_top(
        r"(?s)it raised ModuleNotFoundError: No module named 'zero_maximal'.*line \d+", "import zero_maximal"),
}
