"""Submissions that try to earn points without the work: they look for answers, hide memory or traffic, forge results.

Each says which check must refuse it. What they find, they would use; where nothing is found they raise, as here.
"""

from submissions import Wrong, function, mistakes

from zero_minimal.classroom.lessons import HOUSE, found

COLLECTIVES, GRADIENTS = mistakes(found()["00_collectives"]), mistakes(found()["03_gradients"])
DENIED = r"PermissionError|Permission denied|Operation not permitted|No such file"
VALUES, TRAFFIC, KERNEL = ("test_shards_hold_the_mean_gradient", "test_backward_sends_a_reduce_scatter",
                           "test_the_kernel_counts_a_backward")


def looks(message, *lines):
    """These lines before all others of the file."""
    return Wrong(1, VALUES, message, {}, 2, top="\n".join(lines) + "\n")


def hides(keep, start="", end=""):
    """A whole gradient of each bucket is kept, where Python's list of tensors does not show it."""
    return Wrong(1, KERNEL, r"holds up to \d+.\d MB, as the kernel counts", GRADIENTS.bucket_complete(
        begin=f"self._wait()\nself.kept = getattr(self, 'kept', [])\n{start}",
        fuse=f"bucket.fuse_gradients(whole)\n{keep}") | {"Stage2.reduced_gradients": function(
            "def reduced_gradients(self):", "if not self.reducer.reduced:\n    self.reducer.finish()", end,
            "return [bucket.gradient_shard for bucket in self.buckets]")})


def all_reduces(how, message):
    """An all-reduce that the meter shall not see, and a slice of it."""
    return Wrong(1, TRAFFIC, message, GRADIENTS.bucket_complete(reduce=f"""
        {how}
        shard.copy_(bucket.shard(whole, self.rank) / self.world_size)
        {GRADIENTS.AT_ONCE}
        """.replace("\n        ", "\n")))


def in_backward(message, *lines):
    return Wrong(1, VALUES, message, GRADIENTS.bucket_complete(begin="\n".join(["self._wait()", *lines])), 2)


def gathers(how):
    """Lesson 0 by torch's own all-gather, past the list of calls."""
    return Wrong(3, "test_all_gather_gives_all_parts_in_order", r"wrote \d+ bytes, as the kernel counts", {
        "all_gather": function(
            "def all_gather(part, group=None):", "whole = part.new_empty(dist.get_world_size(group), part.numel())",
            how, "return whole.view(-1)")})


TO_EACH_GROUP = "backend = dist.group.WORLD._get_backend(torch.device('cpu'))"

IN_LESSON_3 = {
    "answers among the tests": looks(
        DENIED, f"text = open('{HOUSE}/tests/03_gradients/right/one_shard_a_parameter.py').read()"),
    "the reference by a folder's descriptor": looks(
        DENIED, "import os", f"folder = os.open('{HOUSE}/zero_minimal', os.O_PATH)",
        "text = os.open('stage2.py', os.O_RDONLY, dir_fd=folder)"),
    "the reference by C++": looks(
        DENIED, "import torch",
        f"text = torch.from_file('{HOUSE}/zero_minimal/stage2.py', size=99, dtype=torch.uint8)"),
    "the reference by torch's reader": looks(
        DENIED, "import torch", f"torch._C.PyTorchFileReader('{HOUSE}/zero_minimal/stage2.py')"),
    "the reference out of git": looks(
        DENIED + "|NotADirectory", "import os", f"os.listdir('{HOUSE}/.git/objects')"),
    "an object that still holds the module": looks(
        r"it raised LookupError: nothing found", "import gc",
        "stages = [each for each in gc.get_objects() if getattr(each, '__name__', '') in ('Stage2', 'Stage3')]",
        "if not stages: raise LookupError('nothing found')"),
    "the reference, once the guard is switched off": looks(
        r"No module named 'zero_minimal.stage2'", "import sys", "frame = sys._getframe()", "while frame:",
        "    for value in frame.f_locals.copy().values():",
        "        if type(value).__name__ == 'Guard': value.over = True", "    frame = frame.f_back",
        "import zero_minimal.stage2"),
    "the memory of the process that forked it": looks(
        DENIED, "import os", "open(f'/proc/{os.getppid()}/mem', 'rb')"),
    "the grader's pipe": looks(
        DENIED, "import os", "parent = open(f'/proc/{os.getppid()}/status').read().split('PPid:')[1].split()[0]",
        "for pipe in range(3, 30): os.open(f'/proc/{parent}/fd/{pipe}', os.O_WRONLY)"),
    "results beside the grader": looks(DENIED, "import torch", f"torch._C.PyTorchFileWriter('{HOUSE}/results.json')"),
    "other tests for the next one": looks(
        DENIED, "import os", f"os.chmod('{HOUSE}/tests/checks.py', 0o666)",
        f"open('{HOUSE}/tests/checks.py', 'a').write('x')"),
    "values off the caller's frame": in_backward(
        r"rank [01] does not know the data of rank [01]", "import toys", "toys.tokens(1 - self.rank, 0)"),
    "a pickle for the grader": in_backward(
        r"is gone|connection to another rank broke|answered with what no rank sends", "import os, pickle, socket",
        "class Run:", "    def __reduce__(self): return os.system, ('touch /tmp/unpickled',)",
        "message = pickle.dumps(Run())",
        "for line in range(3, 99):", "    try: socket.socket(fileno=os.dup(line)).getsockname()",
        "    except OSError: continue",
        "    if os.readlink(f'/proc/self/fd/{line}').startswith('socket'):",
        "        os.write(line, len(message).to_bytes(8, 'big') + message)", "os._exit(0)"),
    "memory under gc.freeze": hides("import gc\nself.kept.append(whole.clone())\ngc.freeze()"),
    "memory in numpy": hides("self.kept.append(whole.clone().numpy())"),
    "memory in bytes": hides("self.kept.append(whole.clone().numpy().tobytes())"),
    "memory in new attributes": hides("done[0].kept = whole.clone().untyped_storage()"),
    "memory while a name is replaced": hides(
        "self.kept.append(whole.clone())",
        "import gc\nif not self.kept: gc.get_objects, self.real = (lambda: []), gc.get_objects",
        "import gc\ngc.get_objects = self.real"),
    "traffic in a thread": all_reduces(
        "import threading\nthread = threading.Thread(target=torch.distributed.all_reduce, args=(whole,))\n"
        "thread.start()\nthread.join()", r"An all-reduce sends twice"),
    "traffic past the dispatcher": all_reduces(
        "backend = torch.distributed.group.WORLD._get_backend(torch.device('cpu'))\nbackend.allreduce([whole]).wait()",
        r"cannot do with less than 14\d.\d kB"),
    "traffic, and the meter's list is cleared": all_reduces(
        "import gc\ntorch.distributed.all_reduce(whole)\n"
        "[each.made.clear() for each in gc.get_objects() if type(each).__name__ == 'Calls']",
        r"cannot do with less than 14\d.\d kB"),
    "no traffic, and a full list": Wrong(
        1, KERNEL, r"add up to|as the kernel counts", GRADIENTS.bucket_complete(
            reduce=f"shard.copy_(bucket.shard(whole, self.rank))\n{GRADIENTS.AT_ONCE}")),
    "answers on the fork server's line": looks(  # a rank has one line to the judge: its own
        r"it raised LookupError: no other line", "import os, socket", "def is_line(number):",
        "    try: return socket.socket(fileno=os.dup(number)).family == socket.AF_UNIX",
        "    except OSError: return False",
        "if sum(map(is_line, range(3, 99))) < 2: raise LookupError('no other line')"),
}
IN_LESSON_0 = {
    "a collective past the dispatcher": gathers(
        f"{TO_EACH_GROUP}\nbackend.allgather([list(whole)], [part]).wait()"),
    "a collective in a thread that nobody sees": gathers(
        "import _thread, time\ndone = []\n"
        "def work():\n    dist.all_gather(list(whole), part)\n    done.append(1)\n"
        "_thread.start_new_thread(work, ())\nwhile not done:\n    time.sleep(0.001)"),
    "another rank's numbers": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"KeyError", {"all_gather": function(
            "def all_gather(part, group=None):", "import toys",
            "return torch.cat([part * toys.seed(rank, 0) for rank in range(dist.get_world_size(group))])")}),
}
