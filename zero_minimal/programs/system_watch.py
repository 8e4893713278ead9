"""System watch: what a system of part B may contain, and how its run is watched: its lines, and what it reads.

A system must do the same on real and on simulated ranks. So its text may not name anything that distinguishes them, or
that the meters do not see; no line may run only on simulated ranks; and there, a parameter that is read must have been
gathered since the last step, though it has no value.
"""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_minimal.core import seams
from zero_minimal.meters.memory import resizes_reported
from zero_minimal.meters.owners import address_of, strided_tensors

USED = {"abc", "bisect", "collections", "contextlib", "copy", "dataclasses", "functools", "heapq", "itertools", "math",
        "operator", "torch", "typing", "weakref", "zero_minimal", "__future__"}
OURS = {"core", "guards", "processes", "extensions", "checkpoint", "offloading", "workload", "paper", "stage0",
        "stage1", "stage2", "stage3", "tensor_parallel", "activation_partitioning", "constant_buffers",
        "defragmentation", "zero_100b"}  # packages and files of the course
# files of the course that may not be imported
MODULES = {"seams", "host", "host_link", "pinned_link", "offloaded_state", "host_process", "fakes"}
NOT_HERE = {name: why for why, names in {  # {forbidden name: reason}
    "it could tell simulated ranks from real ones by it": """
        get_backend get_backend_config FakeTensor FakeTensorMode FakeStore is_fake fakes fake_tensor _subclasses
        fake_mode present get_debug_level _get_current_dispatch_mode _python_dispatch""",
    "the ledger does not see what lies there": """
        numpy from_numpy from_file frombuffer tolist from_blob tobytes bytearray memoryview UntypedStorage share_memory_
        from_dlpack to_dlpack __dlpack__ saved_tensors_hooks save_on_cpu announced kept_here""",
    "the meter does not see what is sent by it": """
        multiprocessing TCPStore FileStore HashStore PrefixStore _get_default_store distributed_c10d rpc socket
        new_group new_subgroups init_process_group split_group""",
    "what a line does must be seen in it": """
        eval exec compile __import__ globals vars locals setattr _C __code__ __globals__ __builtins__ __subclasses__
        settrace importlib __torch_dispatch__ __torch_function__ TorchDispatchMode _disable_current_modes
        disable_current_modes DisableTorchFunctionSubclass fork""",
}.items() for name in names.split()}


def unwanted(source: str) -> str:
    """Why a system's text is not allowed, in one sentence; "" if it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for module in modules:
                root, _, rest = module.partition(".")
                room = (rest.split(".")[0] or next(iter(names))) if root == "zero_minimal" else ""
                last = {module.split(".")[-1], *names} if root == "zero_minimal" else set()
                if root not in USED or room and room not in OURS or last & MODULES:
                    return (f"line {node.lineno} imports {module}: a system of part B is made of torch, of Python's "
                            "small helpers and of the parts of the course that train; threads, C, numpy and files hold "
                            "or send what is not counted")
            words = {part for name in [*names, *modules] for part in name.split(".")}
        else:
            words = {getattr(node, "id", None), getattr(node, "attr", None)}
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and not (
                    len(node.args) > 1 and isinstance(node.args[1], ast.Constant)):
                return f"line {node.lineno} calls {node.func.id} with a computed name: write the name"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NOT_HERE:
                words = {node.value}
        for word in sorted(words & set(NOT_HERE), key=str):
            return f"line {node.lineno} uses {word}: {NOT_HERE[word]}"
    return ""


class Lines:
    """Records which instructions of a file run while this is open: (function, its first line, offset) → line."""

    def __init__(self, path: str):
        self.path, self.places = path, {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._follow)
        try:
            yield
        finally:
            sys.settrace(before)

    def _follow(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename != self.path:
            return None
        if event == "call":
            frame.f_trace_opcodes = True
        elif event == "opcode":
            self.places.setdefault((code.co_qualname, code.co_firstlineno, frame.f_lasti), frame.f_lineno)
        return self._follow

    @property
    def listed(self) -> list[tuple]:
        """(function, its first line, offset, line) for each, ready to be sent to another process."""
        return [(*place, line) for place, line in self.places.items()]


def alone(simulated: list, real: list, twin: str = "the twin") -> str:
    """Which line ran only on simulated ranks, and the likely cause; "" if none did. twin: its description."""
    known = {tuple(place[:3]) for place in real}
    strangers = [(line, name) for name, first, offset, line in simulated if (name, first, offset) not in known]
    if not strangers:
        return ""
    line, name = min(strangers, key=itemgetter(0))
    return (f"line {line}, in {name}, runs on simulated ranks and not on real ones, or not as there: with {twin} it "
            "never ran. Each line that runs at full size must run there too. Does a condition before it depend on "
            "absolute sizes, or on the number of ranks?")


@contextmanager
def gathered_only(faults: list[str], model: torch.nn.Module, zero) -> Iterator[None]:
    """A context for simulated ranks: an operator may read a parameter only if a collective has brought it since the
    last step began, and its memory exists. The first violation is added to `faults`, in one sentence."""
    seen, step = Gathered(model), zero.step

    def counted(*args, **kwargs):
        seen.fresh.clear()  # a step changes all parameters
        seen.steps += 1
        return step(*args, **kwargs)

    zero.step = counted
    try:
        with seams.heard_by("collective", seen.hear), resizes_reported(seen.resized), seen:
            yield
    finally:
        del zero.step
    faults.extend([seen.fault] if seen.fault else [])


class Gathered(TorchDispatchMode):
    """The mode of gathered_only(): `fresh` are the memories that a collective has filled since the last step."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.fault, self.steps, self.fresh, self.of = "", 0, set(), {}

    def resized(self, handle: torch.UntypedStorage) -> None:
        if not handle.nbytes():
            self.fresh.discard(handle._cdata)  # new memory there must be gathered again

    def hear(self, moment: str, call) -> None:
        if moment == "start" and call.name in ("all_gather", "broadcast", "all_reduce"):
            self.fresh |= _places(list(call.tensors))

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        inputs = list(strided_tensors((list(args), list((kwargs or {}).values()))))
        result = operator(*args, **kwargs or {})
        read, made = _places(inputs), _places(result)
        self.of |= {address_of(tensor): self.names[id(tensor)] for tensor in inputs if id(tensor) in self.names}
        if operator.namespace == "c10d":
            self.fresh |= read
        elif not made & read:
            for tensor in inputs:
                self._check(operator, tensor)
        elif read & self.fresh:
            self.fresh |= made  # a copy of gathered values
        return result

    def _check(self, operator, tensor: torch.Tensor) -> None:
        name = self.of.get(address_of(tensor))
        if name is None or self.fault or self.steps == 0 or operator.overloadpacket.__name__ not in READERS:
            return
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
            self.fault = f"{name} is read by {operator} after its memory was freed, before it was gathered again"
        elif address_of(tensor) not in self.fresh:
            self.fault = (f"{name} is read by {operator}, and no collective has brought it since the last step: other "
                          "ranks have changed their parts of it")


READERS = ("mm", "addmm", "bmm", "embedding", "native_layer_norm", "native_layer_norm_backward", "linear")


def _places(tensors) -> set[int]:
    return {address_of(tensor) for tensor in strided_tensors(tensors)}
