"""Differences, in words: which element of which parameter is wrong, on which rank, and by what it is known.

Tests call this once they have found something wrong, outside of the ranks: nothing here decides about points.
"""

import dataclasses

import torch
import toys

MOST = 0.99  # of the elements: what all of them have in common, but for coincidences


class Elements:
    """Names for the elements of a model's parameters, in its order: index 5 is "first.weight[0, 5]"."""

    def __init__(self, model, trained=False):
        self.params = [(name, param.shape) for name, param in model.named_parameters()
                       if param.requires_grad or not trained]

    def __getitem__(self, index):
        for name, shape in self.params:
            if index < shape.numel():
                place = [int(number) for number in torch.unravel_index(torch.tensor(index), shape)]
                return f"{name}{place}" if place else name
            index -= shape.numel()
        return "padding"

    def listed(self, wrong):
        """Of a mask [Ψ]: which parameters it touches, in words."""
        sizes = [shape.numel() for _, shape in self.params]
        touched = [name for (name, _), piece in zip(self.params, wrong[: sum(sizes)].split(sizes), strict=True)
                   if piece.any()]
        return touched[0] + f" and {len(touched) - 1} more" * (len(touched) > 1) if touched else "padding"


def flattened(tensors):
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def narrow(values, *factors):
    """"float16" or "bfloat16" if (nearly) all of these numbers, or `factors` times them, have no more than 16 bits;
    else ""."""
    values = values[(values != 0) & values.isfinite()].double()
    for dtype in (torch.bfloat16, torch.float16):  # what fits the first mostly fits the second
        for factor in (1, *factors):
            scaled = factor * values
            # what is computed in fp32 from 16-bit numbers is one of them up to fp32's rounding
            near = (scaled.to(dtype).double() - scaled).abs() <= 2**-23 * scaled.abs()
            if len(values) > 50 and near.double().mean() > MOST:
                return str(dtype).removeprefix("torch.")
    return ""


def unmatched(one, other, bound):
    """Masks of both: numbers that have no partner in the other list, within the bound."""
    (first, first_places), (second, second_places) = one.sort(), other.sort()
    lonely, left_over = torch.ones(len(one), dtype=torch.bool), torch.ones(len(other), dtype=torch.bool)
    i = j = 0
    a, b, limit = first.tolist(), second.tolist(), float(bound)
    while i < len(a) and j < len(b):
        if abs(a[i] - b[j]) <= limit:
            lonely[first_places[i]] = left_over[second_places[j]] = False
            i, j = i + 1, j + 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return lonely, left_over


def in_shards(parts, wanted, elements, bound):
    """Where the ranks' shards [any layout] are not the wanted gradient [Ψ]: what is on no rank, and what stands there
    in its place."""
    ranks = torch.cat([torch.full((len(part),), rank) for rank, part in enumerate(parts)])
    together = torch.cat(parts)
    missing, left_over = unmatched(wanted, together, bound)
    if not missing.any():
        return f"{int(left_over.sum())} numbers are there that belong to no element"
    example = int((wanted.abs() * missing).argmax())
    text = (f"{int(missing.sum())} of {len(wanted)} elements are on no rank, in {elements.listed(missing)}. For "
            f"example {elements[example]} must be {wanted[example]:.6g}")
    if left_over.any():
        nearest = int(torch.where(left_over, (together - wanted[example]).abs(), torch.inf).argmin())
        text += f"; the nearest number that belongs to no element is {together[nearest]:.6g}, on rank {ranks[nearest]}"
    return text


def example_of(wrong, values, wanted, elements, rank):
    """The worst of the wrong elements of a rank: "…[3, 5] is 0.1 on rank 1, and must be 0.2"."""
    index = int(torch.where(wrong, (values - wanted).abs(), -1.0).argmax())
    return (f"for example {elements[index]} is {values[index]:.6g} on rank {rank}, and must be {wanted[index]:.6g} "
            f"({int(wrong.sum())} of {len(wrong)} elements are wrong, in {elements.listed(wrong)})")


def displaced(values, wanted, wrong, elements, bound):
    """If (nearly) all wrong elements hold what belongs to others: an example; else ""."""
    places = torch.nonzero(wrong & (values != 0)).flatten()
    if len(places) < 20:
        return ""
    pool, origin = wanted.sort()
    after = torch.searchsorted(pool, values[places]).clamp(max=len(pool) - 1)
    before = (after - 1).clamp(min=0)
    off_after, off_before = (pool[after] - values[places]).abs(), (pool[before] - values[places]).abs()
    nearest = torch.where(off_after < off_before, after, before)
    found = torch.minimum(off_after, off_before) <= bound
    if found.double().mean() < 0.9:
        return ""
    example = int(found.nonzero()[0])
    return (f"{elements[int(places[example])]} holds what belongs to {elements[int(origin[nearest[example]])]}")


# --------------------------------------------------------------------------------------------------- how it was trained


def forgetful(optimizer):
    """The optimizer, without memory: its state is empty in each step."""

    class Forgetful(optimizer):
        def step(self, closure=None):
            self.state.clear()
            return super().step(closure)

    return Forgetful


def suspects(recipe):
    """What may have been left out: words, and the recipe without it."""
    yield ("that is what comes of an optimizer whose state (momentum, variance) is empty in each step: is it kept from "
           "step to step?", {"optimizer": forgetful(recipe.optimizer)})
    if recipe.schedule:
        for words, rate in (("of the first step", 0), ("of the optimizer's own options", 99)):
            yield (f"that is what comes of the learning rate {words}: a scheduler changes zero.optimizer.param_groups, "
                   "so read them in each step",
                   {"schedule": lambda optimizer, rate=rate: _fixed(recipe.schedule, optimizer, rate)})
    if recipe.clip:
        yield "that is what comes of training without clipping", {"clip": 0.0}
    if recipe.options.get("weight_decay"):
        undecayed = {**recipe.options, "weight_decay": 0}
        yield "that is what comes of training without weight decay", {"options": undecayed}


def _fixed(schedule, optimizer, step):
    """A scheduler that stays at what the schedule gives in this step."""
    scheduler = schedule(optimizer)
    scheduler.lr_lambdas = [lambda _, rate=rate: rate(step) for rate in scheduler.lr_lambdas]
    for group, base, rate in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * rate(step)
    return scheduler


def suspected(recipe, world_size, parameters, bound):
    """Words for what was left out, if training without it gives these parameters; else ""."""
    for words, change in suspects(recipe):
        other = toys.plain(dataclasses.replace(recipe, **change), world_size)
        if toys.distance(parameters, other.parameters) <= bound:
            return words
    return ""
