"""Ring: which rank holds what while chunks travel around the ring; a learner's algorithms next to the lesson's."""


from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle

from zero_minimal.meters.deliveries import Story, told
from zero_minimal.pictures import style

HELD = ("#FFFFFF", "#D6E6F2", "#A6CBE3", "#6FAAD0", "#0072B2")  # a sum of no rank's part, … , of every rank's part
NEXT = {"edgecolor": "#D55E00", "linewidth": 2.6, "facecolor": "none"}  # outlines what is sent next
MOST_PANELS = 9  # of a learner's story: the first steps and the end


def draw_ring(story: Story, title: str) -> Figure:
    """Which rank holds what: a panel for each step, with a line for each rank and a column for each chunk."""
    states = story.states
    world_size, chunks = len(states[0]), len(states[0][0])
    size = max(0.56 * chunks + 0.2, 1.3), 0.44 * world_size + 0.75  # inches of a panel
    columns = min(len(states), int((style.PAGE - 0.6) / size[0]))
    rows = -(-len(states) // columns)
    result, axes = style.figure(rows, columns, max(5.0, columns * size[0] + 0.6), rows * size[1] + 1.0)
    for panel, axis in enumerate(axes.flat):
        axis.set_visible(panel < len(states))
        if panel >= len(states):
            continue
        _panel(axis, story, panel)
        style.rank_cells(axis, world_size, range(chunks), margin=0.55, named=panel % columns == 0)
        axis.set_title("at the start" if panel == 0 else f"after step {panel}", fontsize=10)
        if panel + columns >= len(states):
            axis.set_xlabel("chunk", fontsize=9)
    result.suptitle(title, fontsize=12)
    between = " " if result.get_figwidth() > 7 else "\n"
    result.supxlabel(f"{meaning(states)}{between}Outlined: what a rank sends to its right neighbour in the next step.",
                     fontsize=9)
    return result


def meaning(states: list) -> str:
    """The meaning of the cells' words; it mentions sums only if ranks add anything."""
    world_size = len(states[0])
    held = {frozenset(parts or ()) for ranks in states for chunks in ranks for parts in chunks}
    sums = sorted((sorted(parts) for parts in held if 1 < len(parts)), key=lambda parts: (len(parts), parts))
    if not sums:
        return "A number: the rank that had this chunk at the start."
    example = "+".join(map(str, sums[0])) if len(sums[0]) < world_size else "all"
    whose = f"what ranks {sums[0][0]} and {sums[0][1]} had" if example != "all" else "what all ranks had"
    return f"{example}: the sum of {whose} at the start."


# ------------------------------------------------------------------------------------------------------ a learner's own


def draw_attempt(seen: dict[str, list[dict[str, dict]]]) -> Figure | None:
    """Which rank holds what while messages travel: two rows of panels for each algorithm, the lesson's and the
    learner's. None if none of the learner's has run.

    Args: seen {whose: [rank]{algorithm: what deliveries.watch returned}}, the lesson's first. If the lesson has no such
        algorithm, the learner's is drawn alone.
    """
    stories = {name: {whose: told([rank[name] for rank in ranks]) for whose, ranks in seen.items() if name in ranks[0]}
               for name in list(seen.values())[-1][0]}
    if not stories:
        return None
    world_size = len(next(iter(seen.values())))
    heights = [len(lines) * (0.3 * world_size + 0.5) + 0.55 for lines in stories.values()]  # inches
    result = Figure(figsize=(style.PAGE, sum(heights)), layout="constrained")
    places = result.subfigures(len(stories), 1, height_ratios=heights, squeeze=False, hspace=0.03)
    for place, (name, lines) in zip(places.flat, stories.items(), strict=True):
        _draw_beside(place, name, lines)
    return result


def _draw_beside(place: SubFigure, name: str, lines: dict[str, Story]) -> None:
    columns = min(MOST_PANELS, max(len(story.states) for story in lines.values()))
    axes = place.subplots(len(lines), columns, squeeze=False)
    model = next(iter(lines.values()))
    for row, (whose, story) in zip(axes, lines.items(), strict=True):
        world_size, chunks = len(story.states[0]), len(story.states[0][0])
        size = _font_size(story, style.PAGE / columns)
        numbers = list(range(len(story.states)))
        if len(numbers) > columns:
            numbers[columns - 1 :] = numbers[-1:]
        for axis in row[len(numbers) :]:
            axis.set_visible(False)
        for axis, number in zip(row, numbers, strict=False):
            _panel(axis, story, number, size)
            for rank, chunk in differences(story, model, number):
                axis.text(chunk - 0.42, rank - 0.4, "≠", ha="left", va="top", fontsize=9, fontweight="bold",
                          color=NEXT["edgecolor"], zorder=4)
            style.rank_cells(axis, world_size, range(chunks), margin=0.55, named=axis is row[0])
            axis.set_title(_moment(number, len(story.states)), fontsize=9)
        row[0].set_ylabel(whose, fontsize=11, fontweight="bold")
    place.suptitle(name, fontsize=12)
    place.supxlabel(_explained(lines), fontsize=9)


def _font_size(story: Story, inches: float) -> float:
    """Points, so that the longest sum fits its cell; `inches` of a panel."""
    world_size, chunks = len(story.states[0]), len(story.states[0][0])
    most = max(len(parts) for ranks in story.states for row in ranks for parts in row
               if parts is not None and len(parts) != world_size)  # a sum of all ranks is one word
    return min(9.0, max(5.0, 0.56 * 72 * inches / chunks / (0.6 * max(3, 2 * most - 1))))


def _moment(number: int, count: int) -> str:
    return "at the start" if number == 0 else "at the end" if number == count - 1 else f"after step {number}"


def _panel(axis: Axes, story: Story, number: int, size: float = 9) -> None:
    """What each rank holds at a step, and outlined what it sends next. A cell is darker with each rank whose part is in
    it, and has their numbers. size: of the font, in points."""
    state = story.states[number]
    world_size = len(state)
    for rank in range(world_size):
        for chunk, parts in enumerate(state[rank]):
            every = parts is not None and sorted(parts) == list(range(world_size))
            shade = HELD[-1] if every else HELD[min(len(parts or ()), len(HELD) - 2)]
            axis.add_patch(Rectangle((chunk - 0.44, rank - 0.42), 0.88, 0.84, facecolor=shade, edgecolor="#999999",
                                     linewidth=0.6))
            words = "?" if parts is None else "all" if every and world_size > 1 else "+".join(map(str, parts))
            axis.text(chunk, rank, words, ha="center", va="center", fontsize=9 if parts is None else size,
                      color="white" if every else "black")
        sent = story.sends[number][rank] if number < len(story.sends) else None
        for chunk in sent[1] if sent else ():
            axis.add_patch(Rectangle((chunk - 0.44, rank - 0.42), 0.88, 0.84, zorder=3, **NEXT))
            if sent[0] != (rank + 1) % world_size:
                axis.text(chunk + 0.42, rank + 0.42, f"→{sent[0]}", ha="right", va="center", fontsize=7, zorder=4,
                          bbox=style.WHITE)


def differences(story: Story, model: Story, number: int) -> list[tuple[int, int]]:
    """(rank, chunk) held or sent differently from the lesson's. Ends can always be compared, other steps only if both
    take equally many."""
    count = len(story.states)
    if number < count - 1 and count != len(model.states):
        return []
    theirs = model.states[-1 if number == count - 1 else number]
    held = {(rank, chunk) for rank, chunks in enumerate(story.states[number]) for chunk, parts in enumerate(chunks)
            if parts is None or sorted(parts) != sorted(theirs[rank][chunk] or ())}
    return sorted(held | (_sent(story, number) ^ _sent(model, number) if number < count - 1 else set()))


def _sent(story: Story, number: int) -> set[tuple[int, int]]:
    return {(rank, chunk) for rank, sent in enumerate(story.sends[number]) if sent for chunk in sent[1]}


def _explained(lines: dict[str, Story]) -> str:
    words = ["Numbers: the ranks whose parts are there. Outlined: what a rank sends next, to its right neighbour."]
    stories = list(lines.values())
    world_size = len(stories[0].states[0])
    others = [sent[0] for story in stories for step in story.sends for rank, sent in enumerate(step)
              if sent and sent[0] != (rank + 1) % world_size]
    marks = [f"→{others[0]}: to rank {others[0]} instead."] if others else []
    if any(differences(story, stories[0], number) for story in stories for number in range(len(story.states))):
        marks.append("≠: not as in the lesson's.")
    if any(parts is None for story in stories for state in story.states for held in state for parts in held):
        marks.append("?: no sum of one chunk's parts.")
    words += [" ".join(marks)] if marks else []
    if len(lines) == 1:
        words.append("The lesson's own is not in this copy of the course: say yourself what must be there at the end.")
    for whose, story in lines.items():
        if story.collectives:
            words.append(f"In {whose}, torch's own {' and '.join(story.collectives)} did the work.")
        if len(story.states) > MOST_PANELS:
            words.append(f"{whose}: {len(story.sends)} steps; the first {MOST_PANELS - 2} and the end are shown.")
    return "\n".join(words)
