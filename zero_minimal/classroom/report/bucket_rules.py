"""Bucket rules: where a recorded training departs from what a stage holds, sends and computes. Each rule yields
(title of a moment, sentence)."""

from collections import Counter
from collections.abc import Iterator

from zero_minimal.classroom.report import small_model
from zero_minimal.classroom.report.small_model import MAX_NORM, RANKS, SIZES
from zero_minimal.classroom.report.stage_rules import OPEN, Rules
from zero_minimal.classroom.report.training_phases import END, Phase

Found = Iterator[tuple[str, str]]
TOO_LARGE = {3: f"{RANKS} times too large: the sum of the ranks, not their mean",
             1 / 3: f"{RANKS} times too small: averaged twice", 2: "twice too large", 1 / 2: "half of what it must be"}


def departures(phase: Phase, rules: Rules, base: list[int]) -> list[tuple[str, str]]:
    """base: [rank] bytes that were there before the model."""
    found = [*_during(phase, rules)]
    for rank in range(RANKS):
        last = phase.last(rank)
        if last is not None:
            found += [*_leaves(phase, rules, rank), *_sent(phase, rules, rank),
                      *_held(phase, rules, rank, last, base[rank]), *_under_way(phase, rank),
                      *_computed(phase, rules, rank, last)]
    if all(phase.over) and phase.ends == "backward" and not any(rules.part in words for _, words in found):
        found += _together(phase, rules)  # what is wrong in itself need not be counted
    return found


# ----------------------------------------------------------------------------------------------- what is held, and sent


def sent_bytes(event: dict) -> float:
    """What a ring sends for a collective: all that a rank sends, if the event begins one."""
    if event["what"] not in ("start", "collective"):
        return 0
    if event["name"] == "send":
        return event["bytes"]
    return (2 if event["name"] == "all_reduce" else 1) * event["bytes"] * (RANKS - 1) / RANKS


def _during(phase: Phase, rules: Rules) -> Found:
    """The first of each kind on a rank, since what follows is mostly the same."""
    most = rules.gradients(phase.ends, True)
    for moment, ranks in phase.moments:
        for rank, events in enumerate(ranks):
            for event in events:
                held = event["memory"]["gradients"]
                if held > most and moment != END and rules.stage:
                    yield moment, (f"Rank {rank} holds {held:,} bytes of gradients, and at most {most:,.0f} are "
                                   f"expected: whole gradients pile up ({len(event['grads'])} of {len(SIZES)} layers "
                                   "have their .grad).")
                if event.get("freed"):
                    yield moment, (f"Rank {rank} has freed the vector of {_name(event)} before it waited for it: it is "
                                   "still being sent.")
                elif event.get("changed"):
                    yield moment, (f"Rank {rank} has written to the vector of {_name(event)} while it was being sent.")
                if event["what"] in ("start", "collective") and event["name"] == "all_reduce" and event["bytes"] > 200 \
                        and rules.stage and phase.ends in ("backward", "micro"):
                    yield moment, (f"Rank {rank} calls all_reduce for {event['bytes']:,} bytes: that sends twice what "
                                   "a reduce-scatter does.")


def _leaves(phase: Phase, rules: Rules, rank: int) -> Found:
    """At stage 0: whether gradients leave while others come, and autograd goes on meanwhile."""
    if rules.stage or phase.ends != "backward":
        return
    arrived, left, under_way, begun, overlaps = 0, 0.0, set(), [], False
    for moment, ranks in phase.moments[:-1]:
        for event in ranks[rank]:
            if event["what"] == "gradient":
                arrived += 4 * SIZES[event["layer"] - 1]
                overlaps = overlaps or bool(under_way)
            left += sent_bytes(event) * RANKS / (RANKS - 1) / 2  # an all-reduce sends that of so many
            if event["what"] == "start":
                under_way.add(event["number"])
                begun.append(moment)
            elif event["what"] == "end":
                under_way.discard(event["number"])
        if arrived - left > OPEN:
            yield moment, (f"Rank {rank} has {arrived:,} bytes of gradients by now, and {left:,.0f} of them have left: "
                           "a bucket leaves when its last gradient is there.")
            return
    if len(begun) > 1 and not overlaps:
        yield begun[0], (f"Rank {rank} waits for each all-reduce before the next gradient comes: autograd stands still "
                         "while they are under way.")


def _name(event: dict) -> str:
    return event["name"].replace("_", "-")


def _sent(phase: Phase, rules: Rules, rank: int) -> Found:
    bounds = rules.sent(phase.ends)
    if bounds is None:
        return
    (least, right, most), sent = bounds, sum(map(sent_bytes, phase.ranks[rank]))
    if not least <= sent <= most:
        called = Counter(_name(event) for event in phase.ranks[rank] if sent_bytes(event))
        names = ", ".join(f"{name} {count} times" for name, count in called.items()) or "nothing"
        yield END, (f"Rank {rank} has sent {sent:,.0f} bytes in this phase, and {right:,.0f} are expected. It called "
                    f"{names}.")


def _held(phase: Phase, rules: Rules, rank: int, last: dict, base: int) -> Found:
    memory, states = last["memory"], rules.states
    if phase.ends == "made" and sum(memory.values()) - base > rules.at_first:
        yield END, (f"Rank {rank} holds {sum(memory.values()) - base:,} bytes when the stage is made, and the "
                    f"parameters are {4 * small_model.ELEMENTS:,} of that.")
    if memory["gradients"] > rules.gradients(phase.ends, False):
        left = f": {len(last['grads'])} of {len(SIZES)} layers still have their .grad" if last["grads"] else ""
        yield END, (f"Rank {rank} holds {memory['gradients']:,} bytes of gradients now, and {states['gradients']:,.0f} "
                    f"are expected, with padding a little more{left}.")
    # a shard of fp32 that only the optimizer has is its master: it counts as optimizer
    shard = max(0, states["parameters"] - memory["parameters"])
    if memory["optimizer"] - shard > rules.optimizer:
        yield END, (f"Rank {rank} holds {memory['optimizer']:,} bytes of optimizer state, and "
                    f"{states['optimizer']:,.0f} are expected.")


def _under_way(phase: Phase, rank: int) -> Found:
    started = {event["number"]: event for event in phase.ranks[rank] if event["what"] == "start"}
    ended = {event["number"] for event in phase.ranks[rank] if event["what"] == "end"}
    left = [event for number, event in started.items() if number not in ended]
    if left:
        yield END, (f"Rank {rank} has started {len(started)} collectives in this phase, and not waited for {len(left)} "
                    f"of them ({_name(left[0])}): what they bring may not be there.")


# --------------------------------------------------------------------------------------------------- what is computed


def _computed(phase: Phase, rules: Rules, rank: int, last: dict) -> Found:
    if phase.ends == "backward":
        yield from _shards(phase, rules, rank, last["shards"])
    elif phase.ends == "clipped":
        yield from _norm(phase, rules, rank, last)
    elif phase.ends in ("stepped", "made") and last["parameters"] is not None:
        yield from _parameters(phase, rank, last["parameters"])


def _shards(phase: Phase, rules: Rules, rank: int, shards: list) -> Found:
    missing = sum(shard is None for shard in shards)
    if missing or not shards:
        yield END, (f"Rank {rank} has no gradient for {missing or 'any'} of its {len(shards)} buckets: they were not "
                    "reduced, or the result was not kept.")
    for value, _ in (run for shard in shards for run in shard or ()):
        if words := _wrong_gradient(value, phase.batches):
            yield END, f"Rank {rank}'s {rules.part} {words}"
            return


def _wrong_gradient(value: float | None, batches: tuple[int, ...]) -> str:
    """What is not right with an element of a shard; "" if it is the mean, or padding."""
    if value is None:
        return ("holds NaN or infinity: memory that nobody wrote to, that was read before the wait was over, or freed "
                "too early.")
    found = small_model.read(value)
    right = {layer: small_model.mean_gradient(layer, *batches) for layer in range(1, len(SIZES) + 1)}
    if value == 0 or value in right.values():
        return ""
    for layer, wanted in right.items():
        old = small_model.mean_gradient(layer, *small_model.STEPS[0])
        if len(batches) > 1 and abs(value - wanted - old) <= 1e-6 * value:
            return f"still has the gradient of step 1 in it (layer {layer})."
    if found is None:
        return f"holds {value:,.6g}, which is no mean of these gradients, and no sum of them."
    whole = small_model.read(right[found.layer])
    if found.parts == whole.parts:
        return f"holds layer {found.layer}'s gradient {TOO_LARGE[found.times]}."
    where = f"has in layer {found.layer} {parts_in_words(found.parts, batches)} alone"
    return f"{where}, and {parts_in_words(whole.parts, batches)} must be in it."


def parts_in_words(parts: tuple, batches: tuple[int, ...]) -> str:
    """Of (rank, batch): the part of rank 1; the parts of ranks 0, 1 and 2; … of the second micro-batch."""
    ranks = sorted({rank for rank, _ in parts})
    words = (f"the part of rank {ranks[0]}" if len(ranks) == 1 else
             f"the parts of ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}")
    seen, names = sorted({batch for _, batch in parts}), ("first", "second")
    if len(batches) < 2:
        return words if seen == list(batches) else f"{words} of another batch"
    return f"{words} of " + ("both micro-batches" if len(seen) > 1 else f"the {names[seen[0]]} micro-batch")


def _norm(phase: Phase, rules: Rules, rank: int, last: dict) -> Found:
    norm, true = last["norm"], small_model.gradient_norm(*phase.batches)
    local = sum(count * (value or 0) ** 2 for shard in last["shards"] for value, count in shard or ()) ** 0.5
    if norm is None or not _near(norm, true):
        is_local = rules.stage and norm is not None and _near(norm, local)
        parts = "all ranks' shards" if rules.stage else "the mean gradient's elements"
        why = ("it is the norm of this rank's shards alone" if is_local else
               "it is the norm after clipping" if norm is not None and _near(norm, MAX_NORM) else
               f"the squares of {parts} add up to its square")
        yield END, (f"clip_grad_norm_ returned {norm if norm is None else f'{norm:.5g}'} on rank {rank}, and the whole "
                    f"gradient's norm is {true:.5g}: {why}.")
    if not last["tensor"]:
        yield END, f"clip_grad_norm_ returned no 0-dim tensor on rank {rank}."
    if last["shards_changed"] and rules.stage:  # at stage 0 torch's own clipping is as good
        yield END, (f"clip_grad_norm_ changed the gradients in rank {rank}'s shards: it changes self.gradient_scale "
                    "alone.")


def _steps(count: int, clipped: bool = True) -> list:
    factor = min(1.0, MAX_NORM / small_model.gradient_norm(*small_model.STEPS[1])) if clipped else 1.0
    return [(small_model.STEPS[0], 1.0), (small_model.STEPS[1], factor)][:count]


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-4 * abs(other) + 1e-9


def _parameters(phase: Phase, rank: int, layers: list) -> Found:
    wanted = small_model.trained(_steps(phase.updates))
    wrong, example = 0, None
    for layer, runs in enumerate(layers, 1):
        for value, count in runs or ():  # at stage 3 a layer is released
            if value is None or not _near(value, wanted[layer - 1]):
                wrong, example = wrong + count, example or (layer, value)
    if not wrong:
        return
    layer, value = example
    words = "NaN or infinity" if value is None else f"{value:.5g}"
    yield END, (f"{wrong} of {small_model.ELEMENTS} parameters of rank {rank} are not what one process would have. "
                f"Layer {layer} holds {words}, and {wanted[layer - 1]:.5g} is right{_why(phase, layer, value)}.")


def _why(phase: Phase, layer: int, value: float | None) -> str:
    if value is None:
        return ""
    if not phase.updates:
        return ": it did not get rank 0's value"
    now = small_model.trained(_steps(phase.updates))
    guesses = {
        "it did not move": small_model.trained(_steps(phase.updates - 1))[layer - 1],
        "the update was made twice": small_model.trained(_steps(phase.updates), times=2)[layer - 1],
        "it went up the gradient": -now[layer - 1],
        "the gradient was not clipped": small_model.trained(_steps(phase.updates, clipped=False))[layer - 1]}
    for words, guess in guesses.items():
        if _near(value, guess):
            return f": {words}"
    others = [other for other, right in enumerate(now, 1) if _near(value, right)]
    return f": that is layer {others[0]}'s value" if others else ""


def _together(phase: Phase, rules: Rules) -> Found:
    """Each gradient is on one rank; at stage 0 on all of them."""
    found = Counter()
    for rank in range(RANKS):
        for value, count in (run for shard in phase.last(rank)["shards"] for run in shard or ()):
            if value != 0:  # padding
                read = small_model.read(value) if value else None
                found[read.layer if read else None] += count
    times = 1 if rules.stage else RANKS
    for layer in range(len(SIZES), 0, -1):
        if found[layer] < times * SIZES[layer - 1] and not found[None]:
            yield END, (f"Of layer {layer}'s {SIZES[layer - 1]} gradients the ranks hold {found[layer]}: the others "
                        "are on no rank.")
            return
        if found[layer] > times * SIZES[layer - 1]:
            yield END, (f"Layer {layer} has {SIZES[layer - 1]} gradients, and the shards of all ranks hold "
                        f"{found[layer]} of it: each rank must own another part.")
            return
