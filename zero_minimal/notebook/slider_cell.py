"""Sliders: the page of `python -m zero_minimal sliders` in a notebook. Move a slider to see memory by stage, what fits,
traffic and time.

    from zero_minimal.notebook.slider_cell import sliders
    sliders()
    sliders(parameters=1.5e9, data_parallel=8, device="A100-40GB")      initial values

With ZERO_READING=1, there are no sliders, only the picture and the tables of the initial values: a stored notebook
shows these, which a reader without a browser's scripts sees, too.
"""

import html
import io
import os

from IPython.display import Image, display

from zero_minimal.paper.quantities import seconds_text, size_text
from zero_minimal.pictures.plan_chart import draw_plan
from zero_minimal.programs import report, what_if
from zero_minimal.programs.plan import state_rows, step_rows, time_rows, verdict


def sliders(**start) -> None:
    """Show the sliders. start: their initial values, as what_if.setting takes them; it says which there are.

    Raises: ValueError if there is no such model; with ZERO_READING=1 also if it cannot be planned.
    """
    if os.environ.get("ZERO_READING", "0") in ("", "0"):
        page = html.escape(what_if.page(**start))
        display({"text/html": f'<iframe srcdoc="{page}" style="width: 100%; height: 60rem; border: 0"></iframe>',
                 "text/plain": "sliders, which need a browser"}, raw=True)
        return
    told = what_if.asked(what_if.setting(**start))
    draw_plan(told).savefig(picture := io.BytesIO(), format="png", dpi=110)
    display(Image(picture.getvalue(), width=830, alt=verdict(told)))
    print(described(told))


def described(told: dict) -> str:
    """What fits, and the plan's tables."""
    row = told["rows"][-1]
    host, there, takes = size_text(row["host_bytes"]), size_text(row["bus_bytes"]), seconds_text(row["bus_seconds"])
    away = [f"offloaded, stages 1 to 3: a rank's host keeps {host}; {there} cross to it\n"
            f"in a step, and as much back, in {takes} together"]
    return "\n\n".join((verdict(told), report.table(state_rows(told)), report.table(step_rows(told)),
                        report.table(time_rows(told)), *(away if told["offloaded"] else [])))
