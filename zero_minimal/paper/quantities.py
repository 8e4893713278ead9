"""Quantities as people write them: 7.5B parameters, 1T, 32GB. Decimal, as in the paper: 1 GB is 10⁹ bytes.

Some programs count in units of 1024 instead: a "32 GB" GPU has 32 GiB = 34.4 GB. Write 32GiB to say so.
"""

import argparse
import math
import re

MOST = 10**18
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BYTES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}


def count(text: str) -> int:
    """A number of things: "7.5B" is 7500000000. The type of a flag; raises argparse.ArgumentTypeError otherwise."""
    return _read(text, COUNTS, "a number above 0, at most 10¹⁸, such as 1.5B: K, M, B and T are 10³, 10⁶, 10⁹ and 10¹²")


def size(text: str) -> int:
    """A number of bytes: "32GB" is 32000000000. The type of a flag; raises argparse.ArgumentTypeError otherwise."""
    return _read(text, BYTES, f"a size above 0, at most 10¹⁸ bytes, such as 32GB; units: {', '.join(BYTES)} "
                 "(GB = 10⁹ bytes, GiB = 2³⁰)")


def _read(text: str, units: dict[str, int], wanted: str) -> int:
    match = re.fullmatch(r"\s*([-+]?[0-9_]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    by_name = {unit.lower(): factor for unit, factor in units.items()}
    if match is None or match[2].lower() not in by_name:
        raise argparse.ArgumentTypeError(f"{wanted}; not {text!r}")
    value = float(match[1]) * by_name[match[2].lower()]
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{wanted}; not {text!r}")
    return round(value)


def count_text(value: float, digits: int = 3) -> str:
    """7500000000 → "7.5B"."""
    for unit, factor in reversed(COUNTS.items()):
        if value >= factor and unit:
            return f"{_digits(value / factor, digits)}{unit}"
    return _digits(value, digits)


def size_text(value: float, digits: int = 3) -> str:
    """31400000000 → "31.4 GB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if value >= BYTES[unit]:
            return f"{_digits(value / BYTES[unit], digits)} {unit}"
    return f"{_digits(value, digits)} B"


def size_unit(value: float) -> tuple[str, int]:
    """The unit in which to print sizes up to this one, and its bytes: 31400000000 → ("GB", 10⁹)."""
    return next(((unit, BYTES[unit]) for unit in ("GB", "MB", "KB") if value >= BYTES[unit]), ("B", 1))


def plural(number: int, thing: str) -> str:
    """"1 rank", "1,024 ranks"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def seconds_text(value: float) -> str:
    """A time in the unit that suits it: "1.2 ms", "45 s", "3.1 h"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if value >= (2 * length if length > 1 else 1):
            return f"{_digits(value / length, 2)} {unit}"
    return f"{_digits(value * 1000, 2)} ms"


def _digits(value: float, digits: int) -> str:
    """At least `digits` significant digits, all digits before the point, no trailing zeros."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(value: int | float) -> str:
    """With thousands separators, and a decimal only if it is not 0: 9,641,984 or 0.5."""
    value = round(value, 1)
    return f"{int(value) if value == int(value) else value:,}"
