"""Chart: memory by category over all steps, a picture a rank. It says nothing that the steps do not say in numbers."""

from zero_minimal.classroom.report.markup import Html, tag, text
from zero_minimal.classroom.report.story import Step

# from the bottom: model states first, which the dashed line is held against. Without "buffers": in so small a run the
# notes that ranks send with each collective would be most of the picture; their bytes stand in the steps
CATEGORIES = ("parameters", "optimizer", "gradients", "activations", "other")
HEIGHT = 100


def charts(steps: list[Step]) -> Html | None:
    """None if no memory was recorded."""
    ranks = max((len(step.memory) for step in steps), default=0)
    top = max([sum(memory.get(name, 0) for name in CATEGORIES) for step in steps for memory in step.memory]
              + [step.limit or 0 for step in steps], default=0)
    if not ranks or not top:
        return None
    top *= 1.05  # so that what is highest can be seen
    names = [name for name in CATEGORIES if any(memory.get(name) for step in steps for memory in step.memory)]
    keys = [tag("span", tag("svg", tag("rect", width=100, height=100, class_=name), class_="key", viewBox="0 0 100 100",
                            aria_hidden="true"), f"{name} ") for name in names]
    return tag("section", tag("h3", "Memory over the run", id="memory"), tag("p", *keys),
               tag("p", f"From the left to the right: the {len(steps)} steps below; the red line is the step that is "
                   f"shown. The top is {top:,.0f} bytes. Dashed: the most that parameters, optimizer and gradients "
                   "together are expected to have.", class_="quiet"),
               tag("div", *(_chart(steps, rank, names, top) for rank in range(ranks)), class_="charts"),
               aria_labelledby="memory")


def _chart(steps: list[Step], rank: int, names: list[str], top: float) -> Html:
    layers, below = [], [0.0] * len(steps)
    for name in names:
        above = [low + (step.memory[rank].get(name, 0) if rank < len(step.memory) else 0)
                 for low, step in zip(below, steps, strict=True)]
        layers.append(tag("path", d=_area(below, above, top), class_=name))
        below = above
    limit = " ".join(f"M{place} {_y(step.limit, top)}h1" for place, step in enumerate(steps) if step.limit)
    highest = max(range(len(steps)), key=below.__getitem__)
    words = f"Memory of rank {rank}: highest in step {highest + 1}, {below[highest]:,.0f} bytes"
    return tag("figure", tag("figcaption", words),
               tag("svg", *layers, tag("path", d=limit, class_="limit"),
                   tag("line", x1=0, x2=0, y1=0, y2=HEIGHT, class_="cursor"),
                   viewBox=f"0 0 {len(steps)} {HEIGHT}", preserveAspectRatio="none", role="img", aria_label=words))


def _y(value: float, top: float) -> str:
    return f"{HEIGHT * (1 - value / top):.2f}"


def _area(below: list[float], above: list[float], top: float) -> str:
    """A path around what lies between two heights, a step a unit to the right."""
    there = "".join(f"V{_y(value, top)}h1" for value in above)
    back = "".join(f"V{_y(value, top)}h-1" for value in reversed(below))
    return str(text(f"M0 {_y(below[0], top)}{there}{back}Z"))
