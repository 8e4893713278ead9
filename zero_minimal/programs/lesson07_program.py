"""The program of lesson 7: bytes of gradient buffers, fused and constant, for more and more parameters.

    torchrun --nproc-per-node 2 zero_minimal/constant_buffers.py
"""

from collections.abc import Callable

import torch

from zero_minimal.processes import interrupts, ranks


@interrupts.program
def main(buffers_class: type, all_reduce: Callable, fused_all_reduce: Callable) -> None:
    """Reduce the same gradients with both functions of the started file; rank 0 prints a row for each size."""
    with ranks.start("cpu") as rank:
        buffers, off = buffers_class(2**20), 0.0
        if rank.rank == 0:
            print("parameters   fused buffer   constant buffers (MB)")
        for millions in (1, 3, 10, 30):
            gradients = [torch.full((1000, 100), float(rank.rank)) for _ in range(10 * millions)]
            fused = [gradient.clone() for gradient in gradients]
            all_reduce(gradients, buffers)
            fused_all_reduce(fused)
            off = max(off, *((one - other).abs().max().item() for one, other in zip(gradients, fused, strict=True)))
            if rank.rank == 0:
                held = sum(buffer.nbytes for buffer in buffers.buffers)
                print(f"{millions:>9}M {4 * millions:>14.1f} {held / 1e6:>18.1f}")
        if rank.rank == 0:
            print(f"largest difference between the two results: {off:g}")
