"""Attempts: a learner's own ring algorithms, step by step, beside the lesson's."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle

from zero_minimal.meters.deliveries import Story, told
from zero_minimal.pictures.ring_chart import NEXT, parts_cell
from zero_minimal.pictures.style import PAGE, rank_cells

MOST_PANELS = 9  # of a story: the first ones, and the end


def draw_attempt(seen: dict[str, list[dict[str, dict]]]) -> Figure | None:
    """Who holds what while messages travel: two lines of panels for each algorithm, the lesson's and the learner's.
    None if nothing of the learner's has run.

    Args: seen {whose: [rank]{algorithm: what deliveries.watch returned}}, the lesson's first. Where the lesson's has
        none of an algorithm, the learner's is drawn alone.
    """
    stories = {name: {whose: told([rank[name] for rank in ranks]) for whose, ranks in seen.items() if name in ranks[0]}
               for name in list(seen.values())[-1][0]}
    if not stories:
        return None
    world_size = len(next(iter(seen.values())))
    heights = [len(lines) * (0.3 * world_size + 0.5) + 0.55 for lines in stories.values()]  # inches
    result = Figure(figsize=(PAGE, sum(heights)), layout="constrained")
    places = result.subfigures(len(stories), 1, height_ratios=heights, squeeze=False, hspace=0.03)
    for place, (name, lines) in zip(places.flat, stories.items(), strict=True):
        _draw_beside(place, name, lines)
    return result


def _draw_beside(place: SubFigure, name: str, lines: dict[str, Story]) -> None:
    columns = min(MOST_PANELS, max(len(story.states) for story in lines.values()))
    axes = place.subplots(len(lines), columns, squeeze=False)
    model = next(iter(lines.values()))
    for row, (whose, story) in zip(axes, lines.items(), strict=True):
        numbers = list(range(len(story.states)))
        if len(numbers) > columns:
            numbers[columns - 1 :] = numbers[-1:]
        for axis in row[len(numbers) :]:
            axis.set_visible(False)
        for axis, number in zip(row, numbers, strict=False):
            _panel(axis, story, number, PAGE / columns)
            for rank, chunk in differences(story, model, number):
                axis.text(chunk - 0.42, rank - 0.4, "≠", ha="left", va="top", fontsize=9, fontweight="bold",
                          color=NEXT["edgecolor"], zorder=4)
            rank_cells(axis, len(story.states[0]), range(len(story.states[0][0])), margin=0.55, named=axis is row[0])
            axis.set_title(_moment(number, len(story.states)), fontsize=9)
        row[0].set_ylabel(whose, fontsize=11, fontweight="bold")
    place.suptitle(name, fontsize=12)
    place.supxlabel(_explained(lines), fontsize=9)


def _moment(number: int, count: int) -> str:
    return "at the start" if number == 0 else "at the end" if number == count - 1 else f"after step {number}"


def _panel(axis: Axes, story: Story, number: int, inches: float) -> None:
    state = story.states[number]
    world_size, chunks = len(state), len(state[0])
    numbers = max(len(parts) for parts in (held for ranks in story.states for row in ranks for held in row)
                  if parts is not None and len(parts) != world_size)  # the sum of all is one word
    size = min(9.0, max(5.0, 0.56 * 72 * inches / chunks / (0.6 * max(3, 2 * numbers - 1))))  # points
    for rank in range(world_size):
        for chunk, parts in enumerate(state[rank]):
            if parts is None:
                parts_cell(axis, rank, chunk, (), world_size)
                axis.text(chunk, rank, "?", ha="center", va="center", fontsize=9)
            else:
                parts_cell(axis, rank, chunk, parts, world_size, size)
        sent = story.sends[number][rank] if number < len(story.sends) else None
        for chunk in sent[1] if sent else ():
            axis.add_patch(Rectangle((chunk - 0.44, rank - 0.42), 0.88, 0.84, zorder=3, **NEXT))
            if sent[0] != (rank + 1) % world_size:
                axis.text(chunk + 0.42, rank + 0.42, f"→{sent[0]}", ha="right", va="center", fontsize=7, zorder=4,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def differences(story: Story, model: Story, number: int) -> list[tuple[int, int]]:
    """(rank, chunk) that are not held, or not sent, as in the lesson's. The ends can be compared, and steps where both
    take as many."""
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
