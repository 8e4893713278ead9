"""Clipping of sharded stages: what lessons 02 and 03 ask of clip_grad_norm_."""

import math

import checks
import pytest
import torch
import toys
from checks import in_words, once
from sharded import (
    BUCKET,
    LIMITS,
    assert_as_in_one_process,
    assert_norm,
    clipped,
    clipped_in_a_group,
    flat,
    gradients_of,
    in_one_process,
    trained_with_norms,
)
from torch import optim
from toys import Recipe

CLIPPED = {
    "training with clipping": (Recipe(options=checks.ADAM, clip=0.1, accumulate=2),
                               "does one step's clipping end with zero_grad()?"),
    "clipping with frozen, tied and unused parameters": (
        Recipe(make=checks.Awkward, batch=checks.awkward_batch, optimizer=optim.SGD, options=dict(lr=0.3), clip=0.1,
               bucket_bytes=100, steps=3),
        "each element counts once, also of a parameter that the model uses twice"),
    "fp16, a loss scale, and clipping": (
        Recipe(optimizer=optim.SGD, options=dict(lr=3.0), dtype=torch.float16, scale=1024.0, clip=0.1, accumulate=2,
               steps=3),
        "the loss was multiplied by 1024, and self.gradient_scale is 1/1024 when clip_grad_norm_ is called: the norm "
        "is that of the gradient times this scale, and clipping multiplies the scale"),
}

WITHOUT = ("rank 0 alone has run a backward when clip_grad_norm_ is called: on the other ranks gradients count as "
           "zero, and they take part in all reductions (reduced_gradients() ends what is left of backward)")


def assert_clips_by_the_global_norm(stage_class, world_size):
    """Those clip_grad_norm_ returned, and what step() did then."""
    true = (sum(gradients_of(world_size)) / world_size).norm().item()
    results = once(clipped, world_size, stage_class)
    for case, max_norm in enumerate(LIMITS):
        local = [flat(rank, of_rank[case][3]).norm().item() for rank, of_rank in enumerate(results)]
        for rank, of_rank in enumerate(results):
            norm, _, change, *_ = of_rank[case]
            assert_norm(norm, true, local, max_norm, rank)
            size = min(max_norm, true)
            assert change == pytest.approx(size, rel=1e-3), (
                f"after clip_grad_norm_({max_norm:g}) step() of SGD with lr 1 moved rank {rank}'s parameters by "
                f"{change:.4g}, and it must be {size:.4g}: "
                + ("a smaller norm than max_norm must be left alone" if max_norm > true else
                   "clipping scales the gradient that the update uses, all of it alike")
            )


def assert_clipping_leaves_the_gradients(stage_class):
    """It returns a 0-dim tensor, and the shards stay as they are."""
    for rank, of_rank in enumerate(once(clipped, 2, stage_class)):
        for (_, shape, _, before, after, last, (*_, sent), scale), max_norm in zip(of_rank, LIMITS, strict=True):
            assert sent <= 1024, (
                f"when the gradients were reduced, clip_grad_norm_({max_norm:g}) sent {in_words(sent)} on rank {rank}: "
                "each rank has the squares of its own shards, and their sum is one number"
            )
            assert torch.equal(flat(rank, before), flat(rank, after)), (
                f"clip_grad_norm_({max_norm:g}) changed the gradients in rank {rank}'s shards: it changes "
                "self.gradient_scale alone, and step() multiplies with that"
            )
            assert torch.equal(flat(rank, after), flat(rank, last)), (
                f"step() changed the gradients in rank {rank}'s shards, after clip_grad_norm_({max_norm:g}): multiply "
                "into a tensor of its own"
            )
            assert scale == 1, (
                f"self.gradient_scale was a tensor of the user's that held 1, and after clip_grad_norm_({max_norm:g}) "
                f"that tensor holds {scale:.4g} on rank {rank}: make a new one, since the user may set it again"
            )
            assert shape == [], (
                f"clip_grad_norm_ returned {'no tensor' if shape is None else f'a tensor of shape {shape}'} on rank "
                f"{rank}: the norm is a 0-dim tensor, as torch's own clip_grad_norm_ returns it"
            )


def assert_scales_a_bucket_at_a_time(stage_class):
    """What lives in clip_grad_norm_ besides: copies of a shard. In step(): a scaled shard, and shards that travel while
    the next is updated."""
    for rank, of_rank in enumerate(once(clipped, 2, stage_class)):
        for (*_, last, (in_clipping, more, _), _), max_norm in zip(of_rank, LIMITS, strict=True):
            assert in_clipping <= 3 * BUCKET, (
                f"in clip_grad_norm_({max_norm:g}) rank {rank} holds up to {in_words(in_clipping)} more than before "
                f"it, and its gradients are {in_words(4 * flat(rank, last).numel())} in all: the norm needs the "
                "squares of a shard at a time, and then a number each"
            )
            assert more <= 3 * BUCKET, (
                f"in step(), after clip_grad_norm_({max_norm:g}), rank {rank} holds up to {in_words(more)} more than "
                f"before it, and its gradients are {in_words(4 * flat(rank, last).numel())} in all: the scaled ones "
                f"need room for a bucket of {in_words(BUCKET)}, or its shard, at a time"
            )


def assert_clips_in_a_group(stage_class):
    """Ranks 0 and 2 of three."""
    first, _, second = toys.run(clipped_in_a_group, 3, stage_class)
    true = (sum(gradients_of(2, ranks=(0, 2))) / 2).norm().item()
    local = [flat(0, first[1]).norm().item(), flat(2, second[1]).norm().item()]
    for place, (norm, _) in enumerate((first, second)):
        assert_norm(norm, true, local, 0.1, place)


def assert_trains_with_clipping(stage_class):
    """As one process does, in fp32 and in fp16 with a loss scale."""
    runs = toys.run(trained_with_norms, 2, stage_class, {name: recipe for name, (recipe, _) in CLIPPED.items()})
    results = [found for found, _ in runs]
    for name, (recipe, hint) in CLIPPED.items():
        plain, _ = in_one_process(recipe, 2)
        near = 1e-4 if recipe.dtype.itemsize == 4 else 2**-7
        for rank, found in enumerate(results):
            norms, _ = found[name]
            first = norms[0], plain.norms[0]  # later ones follow from the parameters
            assert recipe.dtype.itemsize == 4 or math.isfinite(first[0]), (
                f"{name}: clip_grad_norm_ returned {first[0]} on rank {rank} in the first step, and the gradient's "
                f"norm is {first[1]:.4g}. The gradient is finite, and its squares are too large for fp16, whose "
                "largest number is 65504: square and add in fp32"
            )
            assert first[0] == pytest.approx(first[1], rel=near), (
                f"{name}: clip_grad_norm_ returned {first[0]:.4g} on rank {rank} in the first step, and the gradient's "
                f"norm is {first[1]:.4g}. {hint[0].upper()}{hint[1:]}"
            )
    assert_as_in_one_process([{name: parameters for name, (_, parameters) in found.items()} for found in results], 2,
                             CLIPPED)
    for rank, (_, (parameters, first_norm, scaled, (norm_of_rank_0, *twice))) in enumerate(runs):
        after_dropped, after_infinite, before_scaled, after_scaled, after_twice = parameters
        assert norm_of_rank_0 == pytest.approx(0.25 * 60**0.5, rel=1e-4), (
            f"rank 0 alone ran a backward, and the mean of its gradient and of zeros has the norm "
            f"{0.25 * 60**0.5:.4g}. clip_grad_norm_ returned {norm_of_rank_0:.4g} on rank {rank}"
        )
        assert first_norm == pytest.approx(0.5 * 60**0.5, rel=1e-4), (
            f"rank {rank}: the first clip_grad_norm_ returned a norm of {0.5 * 60**0.5:.4g}, and the tensor that it "
            f"returned holds {first_norm:.4g} after later calls. Who keeps norms, to plot them, has wrong ones: return "
            "a new tensor each time"
        )
        assert scaled[0] == pytest.approx(0.25 * 60**0.5, rel=1e-4), (
            f"a norm of {0.5 * 60**0.5:.4g} was looked at with clip_grad_norm_(inf), and then gradient_scale became "
            f"0.5. The next clip_grad_norm_ returned {scaled[0]:.4g} on rank {rank}, and half of it is right: is an "
            "older norm kept?"
        )
        assert (after_dropped == 0.5).all(), (
            "a batch was clipped to 0.001, and dropped with zero_grad(). The next one is not clipped: SGD with lr 1 "
            f"must move each parameter by its gradient, 0.5, and moved rank {rank}'s by {1 - after_dropped[0]:.4g}. "
            "What is still there of the batch before? zero_grad() without step() ends clipping, too"
        )
        moved = after_infinite[1:] != 0.5
        assert not moved.any(), (
            "one of 60 gradients is infinite, so their norm is, too. clip_grad_norm_(1.0) scales by 1 / inf there, as "
            f"in torch: the 59 finite gradients move nothing, and {int(moved.sum())} of their parameters moved on rank "
            f"{rank}"
        )
        moved = (before_scaled - after_scaled)[1].item()
        assert moved == pytest.approx(0.25), (
            "self.gradient_scale was 0.5, as a loss scaler leaves it, and clip_grad_norm_ found a norm far below "
            "max_norm: the scale stays. SGD with lr 1 must move each parameter by 0.5 times its gradient of 0.5, and "
            f"moved rank {rank}'s by {moved:.4g}"
        )
        assert scaled[1] == pytest.approx(scaled[0], rel=1e-4), (
            f"clip_grad_norm_(1e6) returned {scaled[0]:.4g} on rank {rank}, and clip_grad_norm_(inf), which only "
            f"looks, {scaled[1]:.4g}: both are the whole gradient's norm, whatever the limit"
        )
        moved = (after_scaled - after_twice)[1].item() * 60**0.5
        assert [*twice, moved] == pytest.approx([0.25 * 60**0.5, 1, 0.5], rel=1e-3), (
            "clip_grad_norm_ was called with 1.0 and then, before step(), with 0.5: each clips what the one before has "
            f"left, so the second finds a norm of 1, and step() moves by 0.5. On rank {rank} they found {twice[0]:.4g} "
            f"and {twice[1]:.4g}, and step() moved by {moved:.4g}"
        )
