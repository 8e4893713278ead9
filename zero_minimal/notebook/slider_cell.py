"""Sliders: the calculator of `plan` in a notebook. Move a slider to see memory by stage, what fits, traffic and time.

    from zero_minimal.notebook.slider_cell import sliders
    sliders()
    sliders(parameters=1.5e9, data_parallel=8, device="A100-40GB")      initial values

With ZERO_READING=1, there are no sliders, only the picture and the tables of the initial values: a stored notebook
shows these, since sliders need a kernel. lessons/10_whole_system/what-if.html needs none.
"""

import html
import inspect
import io
import os

import ipywidgets
from IPython.display import Image, display

from zero_minimal.paper.formulas import BYTES
from zero_minimal.paper.hardware import GPUS
from zero_minimal.paper.quantities import count_text, seconds_text, size_text
from zero_minimal.pictures.plan_chart import draw_plan
from zero_minimal.programs import report, what_if
from zero_minimal.programs.plan import state_rows, step_rows, time_rows, verdict

STOPS = {  # for each slider: its label, its stops, and how a stop is written
    "parameters": ("parameters Ψ", [int(size) for size in what_if.SIZES], count_text),
    "data_parallel": ("data-parallel N", [2**power for power in range(15)], "{:,}".format),
    "model_parallel": ("model-parallel M", what_if.SHARES, "{:,}".format),
    "batch": ("sequences b", [2**power for power in range(9)], "{:,}".format),
    "sequence": ("tokens s", [2**power for power in range(5, 18)], "{:,}".format),
    "network": ("network", [125e6, 1.25e9, 3.125e9, 6.25e9, 12.5e9, 25e9, 50e9, 100e9],
                lambda speed: f"{size_text(speed)}/s"),
}
CHOICES = {  # for each choice
    "dtype": ("dtype", [(dtype, dtype) for dtype in BYTES]),
    "kept": ("kept", list(zip(("all activations", "checkpoints", "P_a (M > 1)", "P_a+cpu (M > 1)"), what_if.KEPT,
                              strict=True))),
    "offload": ("optimizer on", [("the device", "none"), ("its host (stages 1 to 3)", "cpu")]),
    "device": ("GPU", [(f"{name}: {size_text(gpu.memory)}", name) for name, gpu in GPUS.items()]),
}


class Sliders:
    """The sliders and their results. Attributes: controls, {name: widget}; told, the current result of `plan`, or None.

    Args: start, the initial values, by the names of STOPS and CHOICES. Raises: ValueError for other names, and for
        values that are not stops.
    """

    def __init__(self, **start):
        first = {name: parameter.default for name, parameter in inspect.signature(what_if.setting).parameters.items()}
        unknown = set(start) - STOPS.keys() - CHOICES.keys()
        if unknown:
            raise ValueError(f"no slider is called {', '.join(sorted(unknown))}; there are "
                             f"{', '.join([*STOPS, *CHOICES])}")
        self.controls = {}
        for name, (label, stops, words) in STOPS.items():
            self.controls[name] = ipywidgets.SelectionSlider(
                options=[(words(stop), stop) for stop in stops], continuous_update=False, description=label,
                value=_one_of(name, [*stops], start.get(name, first[name])), **WIDE)
        for name, (label, options) in CHOICES.items():
            self.controls[name] = ipywidgets.Dropdown(
                options=options, description=label, **WIDE,
                value=_one_of(name, [value for _, value in options], start.get(name, first[name])))
        self.picture, self.words = ipywidgets.Image(format="png", width="100%"), ipywidgets.HTML()
        self.picture.add_class("zero-plan")
        for control in self.controls.values():
            control.observe(lambda change: self.update(), "value")
        self.update()

    def update(self) -> None:
        """Calculate, and show the results."""
        try:
            self.told = what_if.asked(what_if.setting(**{name: one.value for name, one in self.controls.items()}))
        except ValueError as error:
            self.told, self.picture.value, text = None, b"", str(error)
        else:
            draw_plan(self.told).savefig(picture := io.BytesIO(), format="png", dpi=110)
            self.picture.value, text = picture.getvalue(), described(self.told)
        self.words.value = f"<pre style='line-height: 1.25'>{html.escape(text)}</pre>"

    def box(self) -> ipywidgets.Widget:
        """All widgets, in two columns if there is room."""
        columns = ipywidgets.Layout(grid_template_columns="repeat(auto-fit, minmax(20em, 1fr))", width="100%")
        return ipywidgets.VBox([ipywidgets.GridBox(list(self.controls.values()), layout=columns), self.picture,
                                self.words])


WIDE = {"style": {"description_width": "9em"}, "layout": {"width": "auto"}}


def sliders(**start) -> None:
    """Show the sliders. start: their initial values, as `Sliders` takes them."""
    made = Sliders(**start)
    if os.environ.get("ZERO_READING", "0") in ("", "0"):
        display(made.box())
        return
    if made.told:
        display(Image(made.picture.value, width=830, alt=verdict(made.told)))
    print(described(made.told) if made.told else "these cannot be planned")


def described(told: dict) -> str:
    """What fits, and the plan's tables."""
    row = told["rows"][-1]
    host, there, takes = size_text(row["host_bytes"]), size_text(row["bus_bytes"]), seconds_text(row["bus_seconds"])
    away = [f"offloaded, stages 1 to 3: a rank's host keeps {host}; {there} cross to it\n"
            f"in a step, and as much back, in {takes} together"]
    return "\n\n".join((verdict(told), report.table(state_rows(told)), report.table(step_rows(told)),
                        report.table(time_rows(told)), *(away if told["offloaded"] else [])))


def _one_of(name: str, stops: list, value: object) -> object:
    if value not in stops:
        raise ValueError(f"{name} stops at {', '.join(map(str, stops))}, not at {value!r}")
    return value
