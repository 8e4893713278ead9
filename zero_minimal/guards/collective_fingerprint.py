"""Fingerprints: every collective says what it is, so ranks in different collectives get an error.

Seams: collective, whose Call gets a tag and a note; messages; rank_ends.

Messages between two ranks arrive in the order in which they were sent, whatever they hold. If one
rank ran one batch more than another, it would take gradients for parameters, and train on. So each
rank sends the others a note with its data:

    all_gather of blocks.1, in forward of step 3, 1,048,576 bytes of float32

`wait()` reads the others' notes before it reads data. Data carries a number made from the note
(gloo's tag), so a rank never takes another collective's message for its own. A rank that ends sends
a last note, so that no rank waits for it.

NCCL has its own check: set TORCH_DISTRIBUTED_DEBUG=DETAIL before the ranks start.
"""

import re
import weakref
import zlib

import torch
import torch.distributed as dist

from zero_minimal.core import seams
from zero_minimal.core.work import Call, other_ranks
from zero_minimal.guards.bucket_names import in_words

LENGTH = 256  # bytes of a note
TAG = 2**30  # of notes; the tags of data are smaller
FINISHED = "finished"
NAIVE = "gradients in "  # of naive.py: what it sends first, and its moment
CHECKPOINT = "a checkpoint to "  # save, load, …: saving.meet
LOADED = ", states loaded: "
CHANGED = ", changed in forward"
EDITED = ", edited by hand"
REWRITTEN = ", gradients changed by hand"  # at stage 0, before the last step()
UPDATED = ", last updated by gradients "  # of naive.py, which clips in place; and their checksum
VALUES = ", parameters "  # and their checksum: a note ends with it, and no message shows it
SCALED = ", after a clipped or unscaled one"  # a step; clipping itself sends nothing at stage 0
SCALE = SCALED + r"( \([^)]*\))?"  # with its number
UPDATE = UPDATED + r"\w+"
SIZE = r", [\d,]+ bytes of \w+$"
RATE = r" with (lr [^ ,]+)?( ?\w+=\S+?)*(?=, |$)"  # and other options

_groups: dict = {}  # the groups in which notes were sent
_open = weakref.WeakKeyDictionary()  # group: its notes that are not yet compared, the oldest first
_last_notes: list = []  # kept until the process ends: they may never be read


class Mismatch(RuntimeError):
    """The ranks are not in the same collective."""


@seams.at("collective")
def give_notes(moment: str, call: Call) -> None:
    """Give the call a note and a tag, if it has several ranks and runs on gloo."""
    sends = moment == "start" and call.travels and call.group.size() > 1
    if sends and dist.get_backend(call.group) == "gloo":
        of = call.of or getattr(call.tensors[0], "_zero_of", "")
        what = f"{call.name} of {in_words(of)}" if of else call.name
        dtype = str(call.tensors[0].dtype)[6:]
        words = f"{what}, {call.bytes:,} bytes of {dtype}{getattr(call.of, 'values', '')}"
        call.note = Fingerprint(words, call.group)
        call.tag = call.note.tag


@seams.at("messages")
def go_along(moment: str, call: Call) -> None:
    """Open, send and read a collective's note together with its data."""
    if call.note is not None:
        getattr(call.note, moment)()


class Fingerprint:
    """The notes of one collective: this rank's own, and the other ranks', for which it waits.

    A note leaves with the first data, not before: a collective that is refused for its arguments
    has sent nothing, so it does not disturb the next one.
    """

    def __init__(self, words: str, group: dist.ProcessGroup):
        self.written = words.encode()[:LENGTH]
        self.words, self.group = _read(self.written), group
        self.tag = zlib.crc32(self.written) % TAG  # of the data; hash() differs by process
        self.own: torch.Tensor | None = None  # [LENGTH], from open() on
        self.arriving, self.leaving, self.has_left = {}, [], False

    def open(self) -> None:
        """From here on the others' notes can arrive."""
        if self.own is None:
            self.own = _as_tensor(self.written)
            _open.setdefault(self.group, []).append(self)
            for other in other_ranks(self.group):
                note = torch.empty_like(self.own)
                self.arriving[other] = note, self.group.recv([note], other, TAG)

    def sent(self) -> None:
        """This rank's note goes out."""
        if not self.has_left:
            self.has_left = True
            _groups[None if self.group is dist.group.WORLD else self.group] = None
            self.leaving = [self.group.send([self.own], other, TAG)
                            for other in other_ranks(self.group)]

    def read(self) -> None:
        """Wait for the others' notes. Raises: Mismatch if one differs from this rank's. A second
        call does nothing.

        Notes of earlier collectives are read first, waited for or not: a rank that disagreed in one
        of them has left, and never comes to this one.
        """
        self.open()
        self.sent()
        line = _open[self.group]
        while self in line:
            line.pop(0)._compare()

    def _compare(self) -> None:
        for other, (note, work) in self.arriving.items():
            try:
                work.wait()
            except RuntimeError as error:  # that rank is gone or late; failures.py reads this
                error.add_note(self.words)
                raise
            if not torch.equal(note, self.own):
                _last_notes.append(self)  # gloo sends no note whose work is freed
                raise Mismatch(self._explained(other, _read(bytes(note.tolist()))))
        for work in self.leaving:
            work.wait()
        self.arriving, self.leaving = {}, []

    def _explained(self, other: int, words: str) -> str:
        """Why this rank and `other`, whose note says `words`, are not in the same collective."""
        here, there = dist.get_rank(self.group), f"rank {other}"
        if words == FINISHED:
            return (f"{there} has finished, and rank {here} waits for it in {self.words}: give all "
                    "ranks the same number of batches (join.together stops them together)")
        both = f"rank {here} is in {self.words}; {there} is in {words}"
        if why := self._of_one_collective(f"rank {here}", there, words, both):
            return why
        if CHECKPOINT in self.words + words:
            return (f"{both}. Save, load and look for checkpoints on all ranks, at the same place "
                    "in training")
        where = f"the ranks are not in the same collective: {both}. "
        if _but(SIZE, words) == _but(SIZE, self.words):
            buffer = ("; what each rank has by itself is no buffer: keep it in an attribute"
                      if "broadcast" in words else "")
            return f"{where}Give the tensor one shape and dtype on all ranks{buffer}"
        if not re.search("forward|backward|step|gather_parameters", self.words + words):
            return where + "All ranks must call the same collectives, in the same order"
        own, its = _steps(self.words), _steps(words)
        if None not in (own, its) and own != its:
            where += f"Calls of step() so far: {own} on rank {here}, {its} on {there}. "
        return (f"{where}All ranks must run the same number of forward and "
                "backward passes (torch.autograd.grad is one, too), with no_sync() around the same "
                "ones; call step(), zero_grad(), clip_grad_norm_() and gather_parameters() on all "
                "of them or on none. At stage 3 they must use the same units in the same order: "
                "where each uses other experts, name the block around them in units=; run forwards "
                "whose number differs, as in generation, under `with zero.gather_parameters():`. "
                "None may keep a result of another forward with its graph there: evaluate under "
                "torch.no_grad(), and keep loss.detach()"
                + (". For two models that share a backward pass: make one stage around both, "
                   "nn.ModuleList([one, other])" if " of model " in self.words + words else ""))

    def _of_one_collective(self, here: str, there: str, words: str, both: str) -> str:
        """Why the notes of ranks in one collective differ: in their rates, checksums or scales. ""
        if the ranks are in different collectives."""
        alike = words == self.words  # except for the checksum
        if not alike and _but(RATE, words) == _but(RATE, self.words):
            return ("the learning rates differ, or other options of the optimizer: "
                    f"{both}. Set the same on all ranks: a scheduler that looks at the loss needs "
                    "its mean over the ranks, collectives.all_reduce(loss)")
        edited = "parameters were edited, or loaded, on some ranks only or not alike"
        edit = ("Edit alike on all ranks" if words.startswith(f"all_reduce of {NAIVE}") else
                "Edit under `with zero.gather_parameters():`, on all ranks, which compares them at "
                "its end")
        if alike:
            return (f"{edited}, or the ranks of group= hold other models: {here} and {there} "
                    f"differ in {self.words}. {edit}")
        if REWRITTEN in words + self.words:
            return ("gradients were changed before the last step() on some ranks only, or not "
                    f"alike, so parameters differ now: {both}. Put what only this rank knows, such "
                    "as a count of its tokens, into the loss; or change gradients by numbers that "
                    "all ranks have, collectives.all_reduce(count)")
        if _but(UPDATE, words) == _but(UPDATE, self.words):
            return ("gradients were clipped or changed before the last step() on some ranks only, "
                    f"or not alike, so parameters differ now: {both}. Call clip_grad_norm_() on "
                    "all ranks, with the same max_norm")
        if EDITED in words + self.words:
            return f"{edited}: {both}. {edit}"
        if CHANGED in words + self.words:
            return (f"forward has changed parameters by what a rank has seen: {both}. Let such a "
                    "layer see its first batch before the model is wrapped, or change parameters "
                    "alike on all ranks")
        if _but(LOADED + r"\d+", words) == _but(LOADED + r"\d+", self.words):
            return (f"load_state_dict() was not called equally often: {both}. Let every rank load "
                    "its own part")
        if _but(SCALE, words) != _but(SCALE, self.words):
            return ""
        if SCALED in words and SCALED in self.words:
            return (f"the last step() scaled the gradients differently: {both}. Give "
                    "clip_grad_norm_() the same max_norm on all ranks, and LossScaler the same "
                    "scale")
        clipped, plain = (there, here) if SCALED in words else (here, there)
        return (f"{clipped} called clip_grad_norm_() or unscale_() before the last step(), and "
                f"{plain} did not, so their parameters differ now: call it on all ranks, and "
                "print what it returns on one")


@seams.at("rank_ends")
def say_goodbye() -> None:
    """This rank ends: every rank that waits for it, now or later, gets an error."""
    for group in _groups if dist.is_initialized() else ():  # the user may have destroyed them
        group = group or dist.group.WORLD
        _last_notes.extend(group.send([_as_tensor(FINISHED.encode())], other, TAG)
                           for other in other_ranks(group))
    _groups.clear()


def _steps(words: str) -> int | None:
    """How often step() has run, by the moment in a note."""
    found = re.search(r"step (\d+)|after (\d+) steps", words)
    return found and (int(found[1]) - 1 if found[1] else int(found[2]))


def _but(pattern: str, words: str) -> str:
    return re.sub(pattern, "", words)


def _as_tensor(words: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(words.ljust(LENGTH)), dtype=torch.uint8)


def _read(note: bytes) -> str:
    return _but(VALUES + r"\d+$", note.decode(errors="replace").rstrip())

