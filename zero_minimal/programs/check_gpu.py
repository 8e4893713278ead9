"""Check-gpu: all checks that need a GPU, in one command of at most 8 minutes.

    python -m zero_minimal check-gpu --json gpu.json --plot gpu.png --trace trace.json

Each part is a separate program (programs/gpu) with a time limit. Its line in the table says what it found, why it
failed, or why it was left out.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from zero_minimal.paper.quantities import plural
from zero_minimal.programs import progress, report
from zero_minimal.programs.gpu.parts import PARTS
from zero_minimal.programs.gpu.place import Place
from zero_minimal.workload.settings import Parser, output_file, picture_file

ALL = 8 * 60.0  # seconds
AT_LEAST = 15.0  # the least in which a part can finish
NO_GPU = "no GPU here, so there is nothing to check: --dry runs the same parts on the CPU, small, to try the command"
OK, OFF, FAILED, SKIPPED = "ok", "off", "failed", "skipped"
MARKS = {True: "ok ", False: "OFF", None: " – "}  # of a check


def run_parts(names: list[str], place: Place) -> list[dict]:
    """The rows of the table: {"part", "title", "status", "why", "seconds"} and the part's results."""
    until, rows = time.monotonic() + ALL, []
    for number, name in enumerate(names, 1):
        progress.announce(f"check-gpu: {number} of {len(names)}, {PARTS[name].title} …")
        began = time.monotonic()
        row = {"part": name, "title": PARTS[name].title, **run_part(name, place, until - began)}
        rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
    progress.take_back()
    return rows


def run_part(name: str, place: Place, left: float) -> dict:
    """Run one part in its own process. place.trace: for the part with messages, if there are several GPUs."""
    part = PARTS[name]
    if not place.dry and place.gpus < part.gpus:
        return {"status": SKIPPED, "why": f"needs {part.gpus} GPUs, and {plural(place.gpus, 'GPU')} is here"}
    if left < AT_LEAST:
        return {"status": SKIPPED, "why": f"{ALL / 60:.0f} minutes are over"}
    limit = min(part.limit, left)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "zero_minimal.programs.gpu.parts", name, "--json", str(file),
                   "--gpus", str(place.gpus), "--limit", str(limit), *["--dry"] * place.dry]
        if place.trace and name == ("overlap" if place.gpus > 1 else "offload"):
            command += ["--trace", place.trace]
        end, said = process(command, limit + 2)  # ranks that hang first report their stacks
        if end is None:
            return {"status": FAILED, "why": f"not done after {limit:.0f} s", "output": said[-4000:]}
        if end or not file.exists():
            return {"status": FAILED, "why": last_words(said) or f"ended with {end}", "output": said[-4000:]}
        found = json.loads(file.read_text(encoding="utf-8"))
    off = [check["what"] for check in found["checks"] if check["ok"] is False]
    return {"status": OFF if off else OK, "why": "; ".join(off), **found}


def process(command: list[str], limit: float) -> tuple[int | None, str]:
    """A command's exit code (None: ended after `limit` seconds) and its output. Its child processes end with it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   env=environment, start_new_session=True)
        try:
            code = running.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also after Ctrl-C
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        output.seek(0)
        return code, output.read()


def last_words(said: str) -> str:
    """Why it failed: the last line of its output that looks like an error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or line.startswith("Fatal")]
    return (errors or lines or [""])[-1][:300]


# ------------------------------------------------------------------------------------------------------ what is printed


def describe(rows: list[dict]) -> str:
    """The table with a line for each check, and the speeds."""
    lines = []
    for row in rows:
        why = f": {row['why']}" if row["why"] and row["status"] in (FAILED, SKIPPED) else ""
        lines += ["", f"{row['title']} ({row['part']}, {row['seconds']:.0f} s): {row['status']}{why}"]
        lines += [f"  {MARKS[check['ok']]} {check['what']}: {check['measured']} (wanted: {check['wanted']})"
                  for check in row.get("checks", ())]
        if row["part"] == "throughput" and "rows" in row:
            lines += ["", speeds(row)]
    counts = {status: sum(row["status"] == status for row in rows) for status in (OK, OFF, FAILED, SKIPPED)}
    lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items() if count)]
    return "\n".join(lines)


def speeds(row: dict) -> str:
    """The table of speeds, with DDP and FSDP2."""
    by_name = {each["name"]: each["step_seconds"] for each in row["rows"]}
    cells = [["", "ms a step", "tokens/s", "of DDP", "of FSDP2", "GB at the peak"]]
    for each in row["rows"]:
        cells.append([each["name"], f"{each['step_seconds'] * 1000:.1f}", f"{each['tokens_per_second']:,.0f}",
                      *(f"{each['step_seconds'] / by_name[peer]:.2f}" for peer in ("DDP", "FSDP2")),
                      f"{each['allocated'] / 1e9:.2f}"])
    return report.table(cells)


def draw(rows: list[dict], path: str) -> str | None:
    """Draw the page of pictures. Returns the reason if that fails, else None."""
    try:
        from zero_minimal.pictures import style
        from zero_minimal.pictures.gpu_report import draw_gpu

        style.save(draw_gpu(rows), path)
    except Exception as error:  # a failed picture, or no matplotlib, must not lose the figures
        return f"no picture: {type(error).__name__}: {error}"
    return None


# -------------------------------------------------------------------------------------------------------------- program


def main(arguments: list[str]) -> str | int | None:
    """The command: run the parts, print their results, write JSON, picture and trace."""
    parser = Parser(prog="python -m zero_minimal check-gpu",
                    description="Run the checks that need a GPU, in at most 8 minutes.")
    parser.add_argument("--parts", metavar="NAME,NAME", help=f"only these of {', '.join(PARTS)}")
    parser.add_argument("--dry", action="store_true", help="without a GPU: run small versions of the parts on the CPU")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results to this file")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw it")
    parser.add_argument("--trace", type=output_file, metavar="FILE.json",
                        help="save the trace of a step, for https://ui.perfetto.dev")
    flags = parser.parse_args(arguments)
    names = flags.parts.split(",") if flags.parts else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    gpus = torch.cuda.device_count()
    if not gpus and not flags.dry:
        return NO_GPU
    place = Place(0 if flags.dry else gpus, flags.dry, str(flags.trace.absolute()) if flags.trace else "")
    rows = run_parts(names, place)
    report.say(describe(rows))
    if flags.json:
        report.write_json({"dry": flags.dry, "gpus": place.gpus, "parts": rows}, flags.json)
    if flags.plot and (why := draw(rows, flags.plot)):
        print(why, file=sys.stderr)
    return 1 if any(row["status"] in (OFF, FAILED) for row in rows) else None

