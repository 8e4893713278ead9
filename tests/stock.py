"""Memory that operators make, whoever refers to it: what the checks of lessons 06 and 10 look at. Runs in a rank, and
travels there by value, as sharded.py does."""

import sys

import cloudpickle
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Stock(TorchDispatchMode):
    """Of all memory that operators make while it is open: how many bytes still live, whoever refers to them.

    known: tensors that were there before, such as parameters.
    """

    def __init__(self, known):
        super().__init__()
        self.noted, self.highest = {}, 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.noted:
                    self.noted[storage._cdata] = StorageWeakRef(storage)
        self.highest = max(self.highest, self.alive())
        return result

    def alive(self):
        sizes = {address: bytes_behind(reference) for address, reference in self.noted.items()}
        self.noted = {address: self.noted[address] for address, size in sizes.items() if size}
        return sum(sizes.values())


def bytes_behind(reference):
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()
