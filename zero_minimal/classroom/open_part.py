"""The open part of lesson 10: points for a system.py, track by track (programs/budget.py has the rules).

The file runs in ranks in the grader's sandbox, like an assignment: first on simulated ranks in a single process, then
on real ones. Only plain numbers come back.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from zero_minimal.classroom import messages
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.guard import guarded
from zero_minimal.classroom.lessons import HOUSE, Lesson, Step
from zero_minimal.classroom.submission import Submission, syntax_error, text_of
from zero_minimal.classroom.supervisor import Supervisor
from zero_minimal.processes.ranks import RankError
from zero_minimal.programs import system_rules, system_watch
from zero_minimal.programs.budget import POINTS, TRACKS, Figures, Score, Track, score

FILE = "system.py"
SECONDS = 240  # for the simulated or the real runs of a track, on a busy machine


def part() -> Lesson:
    """Part B as a lesson: a step for each track."""
    steps = tuple(Step(track.number, track.title, POINTS["gold"], {}, {}, called="track") for track in TRACKS)
    return Lesson(HOUSE / "lessons" / "10_whole_system", "The budget", "real ranks, then one of 64 simulated ones",
                  "", (), "", frozenset(), steps)


class TrackGrades(Grades):
    """Grades for tracks, which do not build on one another: no failure comes from an earlier track."""

    def of(self, step: Step) -> tuple[float, str]:
        found = [result for result in self.results if result[0] == step.number]
        return sum(points for _, _, points, passed, _ in found if passed), "".join(message for *_, message in found)

    def show(self, step: Step) -> None:
        self._said = "", ""  # each track has its own reason, though the words may be the same
        super().show(step)


def judge(file: Path, tracks: tuple[Track, ...] = TRACKS, show: Callable[[Score], object] = lambda score: None,
          ) -> list[Score]:
    """A score for each track; show(score) is called as soon as each is known. A broken file gets 0 and the reason."""
    try:
        source = text_of(file)
        words = syntax_error(source) or system_watch.unwanted(source)
        if not words and "def build(" not in source:
            words = "the file has no build(model, group, budget)"
    except OSError as error:
        words = f"the file cannot be read: {error.strerror}"
    found = []
    with contextlib.nullcontext() if words else contextlib.closing(Supervisor(part(), file)) as supervisor:
        for track in tracks:
            found.append(illegal(track, words) if words
                         else _judged(supervisor, Submission(file, part(), source), track))
            show(found[-1])
    return found


def illegal(track: Track, words: str) -> Score:
    """A score without a medal."""
    return Score(track.number, "", None, None, words)


def _judged(supervisor: Supervisor, submission: Submission, track: Track) -> Score:
    def run(function, world_size, *arguments):
        return supervisor.run(guarded(function, submission), world_size, submission, track.number, *arguments,
                              timeout=SECONDS)

    try:
        simulated = run(on_simulated_ranks, 1)[0]
        budgets = [twin["budget"] for twin in simulated["twins"]]
        real = run(on_real_ranks, 4 if track.model_parallel > 1 else 3, budgets)
        words = system_rules.fault(track, simulated, real)
        return illegal(track, words) if words else score(track, Figures(**simulated["figures"]))
    except (RankError, TimeoutError) as error:
        return illegal(track, messages.brief(messages.of_failure(error, submission.path)))
    except ChildProcessError as error:
        return illegal(track, f"{error}: a submission may not signal other processes")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return illegal(track, f"its ranks answered with what no rank sends ({type(error).__name__})")


def on_simulated_ranks(submission, number: int) -> dict:
    """Run in a single rank: it leaves its world, since a simulation makes its own ranks."""
    dist.destroy_process_group()
    try:
        return system_rules.simulated_runs(submission.build, submission.path, TRACKS[number - 1])
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def on_real_ranks(submission, number: int, budgets: list) -> dict:
    """Run in each of the ranks."""
    return system_rules.real_runs(submission.build, submission.path, TRACKS[number - 1], budgets)


def grade(file: Path, grades: Grades, show: Callable[[Step], object]) -> None:
    """Fill the grades of part(), and show each step when it is done."""
    def one(result: Score) -> None:
        step = grades.lesson.steps[result.track - 1]
        words = f"{result.medal}: {result.words}" if result.medal else result.words
        grades.add(step.number, "medal", result.points, True, words)
        if result.medal != "gold":
            grades.add(step.number, "gold", 0, False)
        if step in grades.steps:
            show(step)

    wanted = {step.number for step in grades.steps}
    judge(file, tuple(track for track in TRACKS if track.number in wanted), one)
