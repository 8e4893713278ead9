"""Saved state: this rank's part of the training state. All ranks' parts together are the whole."""

import torch
import torch.distributed as dist


def shard_state(stage) -> dict:
    """What a rank must save: its shards (the fp32 masters where there are any), optimizer state,
    frozen parameters and buffers, but no random state, and not a LossScaler's.

    As in torch, tensors are not copied.
    """
    return {
        "stage": type(stage).__name__,
        "rank": dist.get_rank(stage.group),
        "world_size": dist.get_world_size(stage.group),
        "buckets": [(bucket.name, bucket.numel, bucket.padded) for bucket in stage.all_buckets],
        "shards": [bucket.master.data if bucket.trained else bucket.parameter_shard
                   for bucket in stage.all_buckets],
        "frozen": _frozen(stage),
        "optimizer": stage.optimizer.state_dict(),
        "buffers": dict(stage.model.named_buffers()),
    }


@torch.no_grad()
def load_shards(stage, state: dict) -> None:
    """Put a rank's part back; the stage then gathers what it holds whole.

    Raises: ValueError if it was saved by another stage, rank, world size or model.
    """
    expected = shard_state(stage)
    for key in ("stage", "world_size", "rank", "buckets"):
        if state.get(key) != expected[key]:
            raise ValueError(f"this state was saved with {key} {state.get(key)}, and is loaded "
                             f"with {expected[key]}: load each rank's own part, with the same "
                             "stage, world size, model and bucket_bytes")
    for bucket, shard in zip(stage.all_buckets, state["shards"], strict=True):
        if bucket.trained:
            bucket.master.copy_(shard)
        bucket.parameter_shard.copy_(shard)
    stage.optimizer.load_state_dict(state["optimizer"])
    for name, buffer in stage.model.named_buffers():
        buffer.copy_(state["buffers"][name])
    for name, param in expected["frozen"].items():
        param.copy_(state["frozen"][name])


def _frozen(stage) -> dict:
    """Parameters that no bucket holds."""
    packed = {param for bucket in stage.all_buckets for param in bucket.params}
    named = stage.model.named_parameters()
    return {name: param.data for name, param in named if param not in packed}
