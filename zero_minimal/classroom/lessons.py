"""Lessons with an assignment: which functions of the reference a learner writes, in which steps, for how many points.

Starters and grader read it here; the checks themselves are tests/NN_name/test_assignment.py, where each test says
which step it belongs to and what it is worth.
"""

from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[2]  # the repository

# words that messages are recognized by
UNWRITTEN = "() is not written yet (step "
LOOK_AT = "\n    To look at: "


@dataclass(frozen=True, eq=False)
class Step:
    """One step: its functions, and for each what must hold when it returns."""

    number: int
    title: str
    points: int
    tasks: dict[str, str]  # "Class.method" or "function": a comment in the starter


@dataclass(frozen=True, eq=False)
class Lesson:
    """One assignment."""

    name: str  # of the folder in lessons/ and in tests/
    reference: str  # module that the starter is cut from
    class_name: str  # what the tests look at: a class of it, or "" for the module
    forbidden: tuple[str, ...]  # modules that would do the learner's work
    steps: tuple[Step, ...]
    world: str = "2 to 4 ranks on the CPU"

    @property
    def starter(self) -> Path:
        return HOUSE / "lessons" / self.name / "assignment.py"

    @property
    def tests(self) -> Path:
        return HOUSE / "tests" / self.name / "test_assignment.py"

    @property
    def tasks(self) -> dict[str, tuple[int, str]]:
        """function: (number of its step, what must hold)."""
        return {name: (step.number, task) for step in self.steps for name, task in step.tasks.items()}


STAGE_FILES = tuple(
    "zero_minimal." + name
    for name in ("stage0", "stage1", "stage2", "stage3", "zero_100b", "constant_buffers", "tensor_parallel")
)

COLLECTIVES = Lesson(
    name="00_collectives",
    reference="zero_minimal.foundations.ring",
    class_name="",
    forbidden=("zero_minimal.foundations.ring", "zero_minimal.foundations.collectives", *STAGE_FILES),
    steps=(
        Step(1, "exchange with both neighbours at once", 15, {
            "exchange": "`outgoing` is with the right neighbour, `incoming` holds what the left one sent, and both may "
                        "be used again.",
        }),
        Step(2, "reduce-scatter", 30, {
            "reduce_scatter": "N-1 exchanges, each of one chunk; afterwards this rank's chunk is summed over all "
                              "ranks.",
        }),
        Step(3, "all-gather", 20, {
            "all_gather": "N-1 exchanges; in each one a rank passes on what arrived in the one before.",
        }),
        Step(4, "all-reduce", 15, {
            "all_reduce": "made of the two above, also when N does not divide n.",
        }),
        Step(5, "broadcast, chunk by chunk", 20, {
            "broadcast": "chunks go down the ring from the root; a rank passes one on while the next one arrives. "
                         "Returns `tensor`.",
        }),
    ),
)

GRADIENTS = Lesson(
    name="03_gradients",
    reference="zero_minimal.stage2",
    class_name="Stage2",
    forbidden=STAGE_FILES,
    steps=(
        Step(1, "gradients become shards during backward", 40, {
            "Stage2.gradient_arrived": "param.grad has been copied to its place in each of these buckets, "
                                       "self.backward knows (filled), and param.grad is gone.",
            "Stage2.bucket_complete": "the reduce-scatter of this bucket's average is under way, and the bucket is "
                                      "closed. At most one is under way at a time.",
            "Stage2._wait": "what is under way, if anything, has ended: its whole gradients are freed, this rank's "
                            "part is in bucket.gradient_shard (step 3: added to it).",
        }),
        Step(2, "update the own shard, gather the parameters", 25, {
            "Stage2.step": "this rank's shards are updated (with self.gradient_scale), every rank has all new "
                           "parameters, layout.broadcast_statistics was called, self.backward.spent is True.",
        }),
        Step(3, "zero_grad, and accumulation", 20, {
            "Stage2.zero_grad": "no gradient and no gradient_scale is left, and self.backward starts afresh (forget).",
        }),
        Step(4, "clipping and the loss scale", 15, {
            "Stage2.clip_grad_norm_": "self.gradient_scale brings the global norm down to max_norm.",
        }),
    ),
)

LESSONS = {lesson.name: lesson for lesson in (COLLECTIVES, GRADIENTS)}
