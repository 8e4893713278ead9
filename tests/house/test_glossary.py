"""The glossary: each term once, in order, with a lesson that uses it, and names that DeepSpeed and torch have."""

import importlib
import importlib.util
import inspect
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pages
import pytest
import torch
from thorough import each

from zero_minimal.classroom.lessons import HOUSE, found

FILE = HOUSE / "lessons/glossary.md"
ENTRY = re.compile(r"\*\*(?P<term>.+?)\*\* \((?P<lessons>.+?)\)\. (?P<text>.+)")
LESSON = re.compile(r"\[(\d\d)\]\((\S+?)/README\.md\)|(\d\d)")
HOUSES = ("DeepSpeed", "FSDP2", "torch")
# words in italics on a lesson's page that are emphasis: a term stands in italics where it is first used
EMPHASIS = {"all", "begin", "elements", "global", "last", "left", "numbers", "own", "right", "your"}


class Entry(NamedTuple):
    """A term, where it is explained, and the words for it elsewhere."""

    term: str
    lessons: list[tuple[str, str]]  # (number, folder; "" if there is no link)
    text: str  # the explanation alone
    words: dict[str, str]  # {"FSDP2": what stands after it}


def read(text: str) -> list[Entry]:
    entries = []
    for item in pages.items(text):
        entry = ENTRY.fullmatch(item)
        assert entry, f"an entry is '- **term** (lesson). Text.', and not: {item}"
        explained, *others = re.split(rf"\*({'|'.join(HOUSES)})\*: ", entry["text"])
        numbers = [(linked or plain, folder) for linked, folder, plain in LESSON.findall(entry["lessons"])]
        entries.append(Entry(entry["term"], numbers, explained, dict(zip(others[::2], others[1::2], strict=True))))
    return entries


ENTRIES = read(FILE.read_text())


def key(term: str) -> str:
    """What it is sorted by: letters, those of a Greek letter's name."""
    if name := re.fullmatch(r"[^a-z]+ \((\w+)\)", term):
        return name[1]
    return "".join(sign for sign in term.lower() if sign.isalnum())


def singular(term: str) -> str:
    return re.sub(r"(?<=ch)es$|(?<=[^s])s$", "", " ".join(term.lower().split()).strip(".,:"))


def test_terms_stand_in_order_and_once():
    keys = [key(entry.term) for entry in ENTRIES]
    assert len(ENTRIES) > 60
    assert keys == sorted(keys), [two for two in zip(keys, keys[1:], strict=False) if two[0] > two[1]]
    assert len(set(keys)) == len(keys), [one for one in keys if keys.count(one) > 1]
    text = FILE.read_text()
    for level, letter in pages.headings(text)[1:]:
        below = read(pages.section(text, level, letter))
        assert below and all(key(entry.term)[0] == letter.lower() for entry in below), f"what stands below {letter}?"


@each(ENTRIES, lambda entry: entry.term)
def test_an_entry_is_short_and_names_lessons_that_use_it(entry):
    assert 1 <= len(pages.sentences(entry.text)) <= 3, "one or two plain sentences"
    written = {lesson.name[:2]: lesson.name for lesson in found().values()}
    rows = set(re.findall(r"^\| \[?(\d\d)", (FILE.parent / "README.md").read_text(), re.MULTILINE))
    assert entry.lessons, "it names no lesson"
    for number, folder in entry.lessons:
        assert number in rows, f"the course has no lesson {number}"
        assert folder == written.get(number, ""), f"link a lesson that is written, and no other: {number}"
        if folder:
            page = (FILE.parent / folder / "README.md").read_text() + (HOUSE / f"notebooks/{folder}.ipynb").read_text()
            name = entry.term.split(" (")[0]
            said = [r"[-_\s]+".join(map(re.escape, re.split(r"[-\s]+", part))) for part in (name, *name.split(" and "))]
            assert re.search("|".join(said), page, re.IGNORECASE), f"page and notebook {number} do not say {name!r}"


@pytest.mark.parametrize("lesson", found().values(), ids=found())
def test_what_a_page_sets_in_italics_is_here(lesson):
    """Italics are for a term at its first use. Something else wants bold, or a place in EMPHASIS."""
    terms = {singular(part) for entry in ENTRIES for part in (entry.term, entry.term.split(" (")[0])}
    page = re.sub(r"`[^`]*`|\*\*.+?\*\*", "", pages.without_code((lesson.folder / "README.md").read_text()))
    italic = {" ".join(words.split()) for words in re.findall(r"(?<![*\w])\*([^*|]+?)\*(?!\*)", page)}
    wanted = {words for words in italic if len(words.split()) <= 3 and not words.endswith((".", "?", "!", ":"))}
    missing = {words for words in wanted if singular(words) not in terms and words.lower() not in EMPHASIS}
    assert not missing, f"in italics, and not in lessons/glossary.md: {', '.join(sorted(missing))}"


# --------------------------------------------------------------------------------------------------- the others' names

SHARD = "torch.distributed.fsdp._fully_shard"
PLACES = ("torch.distributed.fsdp", f"{SHARD}._fsdp_param_group", f"{SHARD}._fsdp_param", f"{SHARD}._fsdp_collectives",
          "torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed.tensor.parallel",
          "torch.distributed._tools.fsdp2_mem_tracker")


def names(house: str) -> list[str]:
    return sorted({name for entry in ENTRIES for name in re.findall("`([^`]+)`", entry.words.get(house, ""))})


def look_up(name: str):
    """What a name of torch's stands for: `torch.path.to.it`, `Class.attribute`, or `function(argument=…)`, which is its
    parameter. Raises: AttributeError, ModuleNotFoundError, or KeyError for a parameter."""
    path, _, argument = re.sub(r"\(\"\w+\"\)", "", name).partition("(")
    first = path.split(".")[0]
    places = ("torch",) if first == "torch" else PLACES
    value = next((module for module in map(importlib.import_module, places) if hasattr(module, first)), torch)
    for part in path.split(".")[first == "torch" :]:
        if inspect.ismodule(value) and not hasattr(value, part):
            with warnings.catch_warnings(action="ignore"):  # what torch says of itself
                importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    if argument:
        return inspect.signature(value).parameters[argument.partition("=")[0]]
    return value


@each(names("FSDP2") + names("torch"))
def test_torch_has_what_the_glossary_names(name):
    assert look_up(name) is not None


@pytest.mark.parametrize("name", ("FSDPParamGroup.arrive", "FSDPGroup", "fully_shard(units=…)", "torch.nn.Shard"))
def test_a_name_that_torch_has_not_got_is_found(name):
    with pytest.raises((AttributeError, KeyError, ModuleNotFoundError)):
        look_up(name)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_has_what_the_glossary_names():
    """Each part of a name stands in its sources. (They are read, not imported: that would take seconds.)"""
    folder = Path(importlib.util.find_spec("deepspeed").origin).parent
    sources = "\n".join(file.read_text(errors="replace") for file in folder.rglob("*.py"))
    known = set(re.findall(r"\w+", sources))
    missing = [name for name in names("DeepSpeed") if not set(name.split(".")) <= known]
    assert len(names("DeepSpeed")) > 20 and not missing, missing
