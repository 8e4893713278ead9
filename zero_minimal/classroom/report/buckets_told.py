"""Buckets, told: the way of gradients into shards, and of shards into parameters, beside the rules of the stage."""

from zero_minimal.classroom.lessons import UNWRITTEN, Lesson
from zero_minimal.classroom.report import bucket_rules, small_model, unit_rules
from zero_minimal.classroom.report.recording import Recorded
from zero_minimal.classroom.report.small_model import BUCKET, ELEMENTS, RANKS, SIZES
from zero_minimal.classroom.report.stage_rules import WORDS, Rules
from zero_minimal.classroom.report.story import RANK, Cell, Grid, Line, Part, Step, Story, alike
from zero_minimal.classroom.report.training_phases import END, PHASES, Phase, phases
from zero_minimal.meters.observer import stage_in

WORLD_SIZE = RANKS
ABOUT = (f"Your {{}} was used once more, on {RANKS} ranks: {len(SIZES)} layers, {ELEMENTS:,} parameters in fp32, "
         f"buckets of {BUCKET} bytes, Adam. Step 1 has one batch, step 2 two micro-batches and clipping. Each rank has "
         "its own data, and rank 0 alone uses layer 1.")
LEGEND = ("Backward goes from the last layer to the first. {} Memory is that of the step's highest moment. 'Expected' "
          "follows from the formulas of the stage, and from the same training in one process.")
SHARDS = "A bucket is what one reduce-scatter carries, a shard what a rank keeps of it."
UNITS = "Layers 1 and 2 are one unit, which is gathered as a whole; each other layer is one by itself."
BUCKETS = ("A bucket is what one all-reduce carries.", SHARDS, SHARDS, f"{SHARDS} {UNITS}")  # by stage
REDUCES, GATHERS = ("reduce_scatter", "all_reduce", "reduce"), ("all_gather", "broadcast")


def names(lesson: Lesson) -> list[str]:
    """One run: a training."""
    return ["training"]


def tell(lesson: Lesson, runs: list[Recorded]) -> Story:
    """Raises: what broken records lead to, ValueError, KeyError, TypeError and the like."""
    run, rules = runs[0], Rules(stage_in(lesson.class_name))
    first = [next((event["memory"] for event in rank if event["what"] == "empty"), {}) for rank in run.ranks]
    base = [sum(memory.values()) for memory in first]
    cut = phases(run.ranks)
    parts = [part_of(phase, rules, base, first, cut[0]) for phase in cut]
    if run.ended:
        if (not cut or all(cut[-1].over)) and len(cut) < len(PHASES):  # no rank got as far as to write anything
            title, ends, *_ = PHASES[len(cut)]
            parts.append(Part(title, f"Expected: {WORDS[ends][rules.stage]}.", []))
        title = "Not written yet" if UNWRITTEN in run.ended else "It stops here"
        parts[-1].steps.append(Step(title, departures=[run.ended]))
    _carry_on([step for part in parts for step in part.steps])
    return Story(ABOUT.format(lesson.class_name), LEGEND.format(BUCKETS[rules.stage]), parts)


def _carry_on(steps: list[Step]) -> None:
    """A rank to which nothing happens holds what it held."""
    for before, step in zip(steps, steps[1:], strict=False):
        step.memory = [now or then for now, then in zip(step.memory, before.memory, strict=False)] or before.memory


def part_of(phase: Phase, rules: Rules, base: list[int], first: list[dict], made: Phase) -> Part:
    """A phase, moment by moment. `made`: the first one."""
    between = [event and event["memory"]["parameters"] for event in map(made.last, range(RANKS))]
    found, steps = [*unit_rules.departures(phase, rules, between), *bucket_rules.departures(phase, rules, base)], []
    for title, ranks in phase.moments:
        is_end = title == END
        step = Step(phase.title if is_end and len(phase.moments) == 1 else title,
                    departures=[words for moment, words in found if moment == title])
        step.lines = _lines(phase, rules, ranks, is_end, step.departures)
        step.grids = _grids(phase, rules, ranks)
        step.memory = [_highest(events, first[rank]) for rank, events in enumerate(ranks)]
        step.limit = rules.limit(phase.ends, not is_end)
        steps.append(step)
    return Part(phase.title, f"Expected: {WORDS[phase.ends][rules.stage]}.", _once(steps))


def _once(steps: list[Step]) -> list[Step]:
    """The same departure goes on from step to step: only the first of a rule on a rank is told."""
    told: set = set()
    for step in steps:
        new = {_rule(words): words for words in reversed(step.departures) if _rule(words) not in told}
        told |= set(new)
        step.departures = alike([words for words in dict.fromkeys(step.departures) if words in new.values()])
    return steps


def _rule(words: str) -> tuple:
    """What a sentence is about: its ranks, and how it begins, without other numbers."""
    return *RANK.findall(words), *[word for word in words.split() if not any(map(str.isdigit, word))][:8]


def _highest(events: list[dict], first: dict) -> dict[str, int]:
    """Memory by category at the highest moment, without what was there before the model."""
    moments = [event["memory"] for event in events]
    if not moments:
        return {}
    top = max(moments, key=lambda memory: sum(memory.values()))
    return {category: max(0, bytes - first.get(category, 0)) for category, bytes in top.items()}


# -------------------------------------------------------------------------------------------------------- what was done


def _lines(phase: Phase, rules: Rules, ranks: list[list[dict]], is_end: bool, departures: list[str]) -> list[Line]:
    did = [_said(phase, rules, rank, events, is_end) for rank, events in enumerate(ranks)]
    expected = _expected(phase, rules, is_end)
    wrong = [any(f"ank {rank}" in words or not RANK.search(words) for words in departures) for rank in range(RANKS)]
    if len(set(did)) == 1 and len(set(wrong)) == 1:
        return [Line("all ranks", did[0], expected, wrong[0])]
    return [Line(f"rank {rank}", words, expected, wrong[rank]) for rank, words in enumerate(did)]


def _said(phase: Phase, rules: Rules, rank: int, events: list[dict], is_end: bool) -> str:
    """What a rank did, in words."""
    told = [f"layer {event['layer']}'s gradient is there" for event in events if event["what"] == "gradient"]
    told += [_words(*token) for token in _tokens(phase.ranks[rank], events)]
    if is_end and phase.last(rank):
        told += _at_the_end(phase, rules, rank, phase.last(rank))
    return "; ".join(told) or "nothing"


def _tokens(own: list[dict], events: list[dict]) -> list[list]:
    """[what, name, first, last, bytes] of collectives in a row: the first to the last of this name in the phase."""
    places, counts, tokens = {}, {}, []
    for event in own:
        if event["what"] in ("start", "collective"):
            counts[event["name"]] = counts.get(event["name"], 0) + 1
            places[id(event) if event["what"] == "collective" else event["number"]] = counts[event["name"]]
    for event in events:
        if event["what"] not in ("start", "wait", "end", "collective"):
            continue
        place = places.get(id(event) if event["what"] == "collective" else event["number"], 0)
        this, before = [event["what"], event["name"], place, place, event["bytes"]], tokens[-1] if tokens else None
        for last, later, both in (("wait", "end", "waited"), ("start", "waited", "at once")):
            if this[0] == later and before and before[:4] == [last, *this[1:4]]:
                this[0] = both
                tokens.pop()
                before = tokens[-1] if tokens else None
        if before and before[:2] == this[:2] and before[3] + 1 == place:
            before[3] = place
        else:
            tokens.append(this)
    return tokens


def _words(what: str, name: str, first: int, last: int, size: int) -> str:
    several = last > first
    name = f"{name.replace('_', '-')}{'s' * several}" + (f" {first} to {last}" if several else f" {first}")
    if not last:  # begun in an earlier phase
        name = name.rpartition(" ")[0]
    return {"start": f"{name} start{'s' * (not several)} ({size:,} bytes)", "wait": f"waits for {name}",
            "end": f"{name} {'are' if several else 'is'} done",
            "at once": f"{name} ({size:,} bytes), {'each ' * several}waited for at once",
            "waited": f"waits for {name}, {'which are' if several else 'which is'} done then",
            "collective": f"calls torch's {name} ({size:,} bytes)"}[what]


def _at_the_end(phase: Phase, rules: Rules, rank: int, last: dict) -> list[str]:
    sent = sum(map(bucket_rules.sent_bytes, phase.ranks[rank]))
    told = [f"in this phase it has sent {sent:,.0f} bytes"]
    told += [f"gradients take {last['memory']['gradients']:,} bytes, optimizer state {last['memory']['optimizer']:,}"]
    if phase.ends == "backward":
        told.append(f"its {rules.part}s hold {_shards_in_words(last['shards'], phase.batches)}")
    if phase.ends == "clipped" and last["norm"] is not None:
        told.append(f"clip_grad_norm_ returned {last['norm']:.5g}")
    return told


def _shards_in_words(shards: list, batches: tuple[int, ...]) -> str:
    """How many gradients, and whose parts are in them."""
    counts: dict[str, int] = {}
    runs = [run for shard in shards for run in shard or ()]
    found = [small_model.read(value) for value, _ in runs if value]
    likely = next((each.times for each in found if each and each.times != 1), 1)
    for value, count in runs:
        found = small_model.read(value, likely) if value else None
        words = "of padding" if value == 0 else "of nobody" if found is None else (
            f"with {bucket_rules.parts_in_words(found.parts, batches)}" + (f", times {found.times:.3g}"
                                                                           if found.times != 1 else ""))
        counts[words] = counts.get(words, 0) + count
    return ", ".join(f"{count} {words}" for words, count in counts.items()) or "nothing"


def _expected(phase: Phase, rules: Rules, is_end: bool) -> str:
    if not is_end:
        if phase.ends not in ("backward", "micro") or not rules.stage:
            return WORDS[phase.ends][rules.stage]
        most = f"gradients of at most {rules.gradients(phase.ends, True):,.0f} bytes"
        return f"one unit can be read, and the next one is on its way; {most}" if rules.stage == 3 else most
    told, bounds = [], rules.sent(phase.ends)
    if bounds:
        told.append(f"about {bounds[1]:,.0f} bytes are sent in this phase")
    if phase.ends in ("backward", "micro") and rules.stage:
        told.append(f"gradients take {rules.states['gradients']:,.0f} bytes and padding")
    if phase.ends == "backward":
        whole = small_model.read(small_model.mean_gradient(2, *phase.batches))
        told.append(f"a gradient has {bucket_rules.parts_in_words(whole.parts, phase.batches)} in it; layer 1's that "
                    "of rank 0")
    if phase.ends == "stepped":
        told.append(f"optimizer state takes {rules.states['optimizer']:,.0f} bytes; parameters are as in one process")
    if phase.ends == "clipped":
        told.append(f"the norm is {small_model.gradient_norm(*phase.batches):.5g}")
    return "; ".join(told) or WORDS[phase.ends][rules.stage]


# ---------------------------------------------------------------------------------------------------------------- grids


def _grids(phase: Phase, rules: Rules, ranks: list[list[dict]]) -> list[Grid]:
    """Which layers have a whole gradient, and how far the collectives of the phase are, after this moment."""
    grids, last = [], [_before(own, moment) for own, moment in zip(phase.ranks, ranks, strict=True)]
    if phase.ends in ("backward", "micro"):
        columns = list(range(len(SIZES), 0, -1))
        grids.append(Grid("Layers that have their .grad, whole", [f"layer {layer}" for layer in columns], [
            (f"rank {rank}", [Cell("whole", "some") if events and layer in events[-1]["grads"] else Cell("–")
                              for layer in columns]) for rank, events in enumerate(last)]))
    if rules.stage == 3:
        layers = range(1, len(SIZES) + 1)
        grids.append(Grid("Layers whose parameters can be read", [f"layer {layer}" for layer in layers], [
            (f"rank {rank}", [Cell("whole", "all") if events and layer in events[-1]["here"] else Cell("–")
                              for layer in layers]) for rank, events in enumerate(last)]))
    for kinds, title, done in ((REDUCES, "Reductions of this phase, in order", "shard" if rules.stage else "mean"),
                               (GATHERS, "Gathers of this phase, in order", "whole")):
        calls = [_calls(own, kinds) for own in phase.ranks]
        count = max(map(len, calls))
        if count > 1:
            grids.append(Grid(title, [str(place + 1) for place in range(count)], [
                (f"rank {rank}", _progress(_calls(last[rank], kinds), count, done)) for rank in range(RANKS)]))
    return grids


def _before(own: list[dict], moment: list[dict]) -> list[dict]:
    """Events of a phase up to the end of a moment."""
    if not moment:
        return []
    return own[: next(place for place, event in enumerate(own) if event is moment[-1]) + 1]


def _calls(events: list[dict], kinds: tuple[str, ...]) -> list[tuple[dict, str]]:
    """(its first event, how far it is): "start", "end", or for torch's own "collective"."""
    ended = {event["number"] for event in events if event["what"] == "end"}
    return [(event, "end" if event["what"] == "collective" or event["number"] in ended else "start")
            for event in events if event["what"] in ("start", "collective") and event["name"] in kinds]


def _progress(calls: list, count: int, done: str) -> list[Cell]:
    cells = [Cell(done, "all") if how == "end" else Cell("on its way", "way") for _, how in calls]
    return cells + [Cell("–")] * (count - len(cells))
