"""The budget: a system of your own. budget.md, beside this file, says what its three tracks ask for.

    python -m zero_minimal grade lessons/10_whole_system/system.py
    python -m zero_minimal simulate --stage lessons/10_whole_system/system.py --layers 4 --hidden 512 --dtype bf16 \
        --budget-memory 100MB

model    on the meta device: shapes, and no memory yet. It is a GPT, or a rank's part of one.
group    the ranks that share it; None are all of them.
budget   .memory   the most bytes on the device at any moment, or None: then send as little as you can
         .sent     the most bytes that this rank sends in a step over `group`, or None: then hold as little as you can
         .batch, .sequence   what a rank works on at once, .options   AdamW's
returns  what is used like a stage: .step(), .zero_grad()
"""

from torch.optim import AdamW

from zero_minimal.stage2 import Stage2


def build(model, group, budget):
    return Stage2(model, AdamW, group=group, **budget.options)
