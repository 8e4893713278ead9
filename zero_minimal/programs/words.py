"""Words: text for a terminal of 80 columns."""

import re
import textwrap

COLUMNS = 80  # of a default terminal: no line is longer


def paragraph(*sentences: str, indent: int = 0, hang: int = 0) -> str:
    """Join sentences, in lines that fit. The first line begins at `indent`, the others at `indent + hang`. Numbers stay
    with their units."""
    text = re.sub(r"(?<=[\d=×]) (?=[\w×])| (?=[=×] )", "\N{NO-BREAK SPACE}", " ".join(filter(None, sentences)))
    lines = textwrap.fill(text, COLUMNS, initial_indent=" " * indent, subsequent_indent=" " * (indent + hang),
                          break_on_hyphens=False, break_long_words=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")
