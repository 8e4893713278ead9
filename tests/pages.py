"""Pages: as much of Markdown as tests of the course's pages need: sections, folded parts, links, commands, sentences.

`text` is a page, or a part of one, as it stands in the file.
"""

import itertools
import re
import shlex

FENCE = re.compile(r"^ *(```|~~~)")
DETAILS = re.compile(r"<details[^>]*>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def is_code(text: str) -> list[bool]:
    """For each line whether it is code: fenced, or indented by four spaces after an empty line or more code. What is
    indented below the item of a list is text."""
    found, fenced, in_list, before = [], False, False, ""
    for line in text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
            found.append(True)
            continue
        if line.strip() and not line.startswith(" "):
            in_list = bool(re.match(r"([-*+]|\d+\.) ", line))
        goes_on = found[-1] if found else False
        found.append(fenced or line.startswith("    ") and not in_list and (goes_on or not before.strip()))
        before = line
    return found


def without_code(text: str) -> str:
    """With empty lines for those of code."""
    return "\n".join("" if code else line for line, code in zip(text.splitlines(), is_code(text), strict=True))


def code(text: str) -> str:
    """The lines of code alone."""
    return "\n".join(line for line, code in zip(text.splitlines(), is_code(text), strict=True) if code)


def headings(text: str) -> list[tuple[int, str]]:
    """(level, title) of all headings, in order."""
    found = re.findall(r"^(#{1,6}) +(.+?) *$", without_code(text), re.MULTILINE)
    return [(len(marks), title) for marks, title in found]


def section(text: str, level: int, title: str) -> str:
    """What stands below a heading, down to the next one of its level or above; "" if there is none."""
    lines, plain, start = text.splitlines(), without_code(text).splitlines(), None
    for number, line in enumerate(plain):
        if start is None and re.fullmatch(rf"{'#' * level} +{re.escape(title)} *", line):
            start = number + 1
        elif start is not None and re.match(rf"#{{1,{level}}} ", line):
            return "\n".join(lines[start:number])
    return "" if start is None else "\n".join(lines[start:])


def head(text: str) -> str:
    """What stands before the first heading of level 2."""
    plain = itertools.takewhile(lambda line: not line.startswith("## "), without_code(text).splitlines())
    return "\n".join(text.splitlines()[: len(list(plain))])


def after_bold(text: str, words: str) -> str:
    """What stands after **words**, up to the next paragraph that begins in bold."""
    match = re.search(rf"^\*\*{re.escape(words)}\.?\*\*(.*?)(?=^\*\*|\Z)", text, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else ""


def folded(text: str) -> list[tuple[str, str]]:
    """(summary, what is folded below it), in order."""
    return [(summary.strip(), inside.strip()) for summary, inside in DETAILS.findall(text)]


def without_folded(text: str) -> str:
    return DETAILS.sub("", text)


def items(text: str) -> list[str]:
    """The items of its lists, those of lists in lists left out; of a table the rows are none."""
    plain = without_code(text)
    return [" ".join(item.split()) for item in re.findall(r"^(?:[-*+]|\d+\.) +(.+?)(?=^\S|^\s*$|\Z)", plain,
                                                          re.MULTILINE | re.DOTALL)]


# --------------------------------------------------------------------------------------------------- links and commands


def anchor(title: str) -> str:
    """The name that GitHub gives a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Where a link into this page may lead."""
    found: dict[str, int] = {}
    names = set()
    for _, title in headings(text):
        name = anchor(title)
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def links(text: str) -> list[str]:
    """Targets of links and pictures, in order."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", without_code(text)))


COMMAND = re.compile(r"(?:torchrun|python) (?:-m zero_minimal|[^\n`|&;>]*?(?:zero_minimal|lessons)/\S+\.py)[^\n`|&;>]*")


def commands(text: str) -> list[list[str]]:
    """Commands of ours that a page tells to type, in code or between backticks, as words. A line that ends with a
    backslash, and a command that is broken between backticks, go on in the next line."""
    lines = re.sub(r" *\\\n\s*", " ", code(text))
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", without_code(text))]
    found = [match for part in (lines, *spans) for match in COMMAND.findall(part)]
    return [shlex.split(command, comments=True) for command in found]


# ------------------------------------------------------------------------------------------------------------ sentences

# a full stop, unless what follows goes on in a small letter; some names begin with one
END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`]*(?:[^\sa-z]|gloo|torch|fp16|fp32|bf16))")


def sentences(text: str) -> list[str]:
    """Sentences of its paragraphs: no headings, lists, tables, code and questions that fold something."""
    plain = re.sub(r"<summary>.*?</summary>|<[^>]+>", "\n\n", without_code(text), flags=re.DOTALL)
    plain = IMAGE.sub("", plain)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)  # a link's words
    plain = re.sub(r"`[^`]+`", "`code`", plain)
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", plain)]
    prose = [part for part in paragraphs if part and not re.match(r"[#|>]|([-*+]|\d+\.) ", part)]
    return [" ".join(one.split()) for part in prose for one in END.split(part) if one.strip()]


def words(sentence: str) -> int:
    """How many words it has: what has no letter or digit is none."""
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())
