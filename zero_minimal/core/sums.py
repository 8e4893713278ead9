"""Sums: how a rank sums the parts that it received. They are added in rank order, so that an
element has the same sum in every bucket, bit for bit."""

import torch

PIECE = 2**17  # elements summed at a time: so much of every rank's part stays in the cache


def sum_in_rank_order(parts: list[torch.Tensor], output: torch.Tensor, op: str) -> None:
    """Sum ("sum") or mean ("avg") of every rank's part [s] → output [s], rank 0's first, piece by
    piece. 16-bit parts are summed in fp32 and rounded once."""
    wide = torch.float32 if output.element_size() < 4 else output.dtype
    scratch = output.new_empty(min(output.numel(), PIECE), dtype=wide)
    for start in range(0, output.numel(), PIECE):
        result = output[start : start + PIECE]
        total, *others = [part[start : start + PIECE].to(wide) for part in parts]
        for other in others[:-1]:
            total = torch.add(total, other, out=scratch[: len(result)])
        for other in others[-1:]:
            # the last sum may overwrite a part, if `output` lies there: nothing reads it later
            goes = result if wide == output.dtype else scratch[: len(result)]
            total = torch.add(total, other, out=goes)
        if op == "avg":
            torch.div(total, len(parts), out=result)
        else:
            result.copy_(total)
