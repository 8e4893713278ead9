"""A DeepSpeed file as it is read: all its keys with their sections, each of them one that there is.

deepspeed_keys.py has the table; what becomes of the keys is deepspeed_config.py's.
"""

import json
from collections.abc import Iterator
from typing import Any

from zero_minimal.workload.deepspeed_keys import KINDS, OFF, SECTIONS, TABLE, Key
from zero_minimal.workload.settings import meant


def read(path: str) -> dict[str, Any]:
    """{"section.key": value} of a file. Raises: ValueError for what is no JSON, or has keys that
    DeepSpeed does not know."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON ({error}); comments and commas at an end are not read "
                         "here") from None
    if not isinstance(content, dict):
        raise ValueError("it must be an object, {…}, of DeepSpeed's keys")
    for section in KINDS:  # first: another optimizer has parameters that are not in the table
        if isinstance(part := content.get(section), dict) and "type" in part:
            check_kind(section, part["type"])
    return dict(_flat(content, ""))


def check_kind(section: str, kind: Any) -> str:
    """Its name in KINDS. Raises: ValueError, saying which there are."""
    kinds = {each if section == "scheduler" else each.lower(): each for each in KINDS[section]}
    name = kind.lower() if section == "optimizer" and isinstance(kind, str) else kind
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"{section}.type is {json.dumps(kind)}: there are "
                         f"{', '.join(KINDS[section])} here{meant(str(kind), KINDS[section])}")
    return kinds[name]


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]} stands there twice: DeepSpeed refuses that, too")
    return dict(pairs)


def _flat(content: dict, section: str) -> Iterator[tuple[str, Any]]:
    """Its keys with their sections. One that is turned off has no other keys."""
    is_off = content.get("enabled", True) in OFF or content.get("device", "cpu") in OFF
    for key, value in content.items():
        name = f"{section}.{key}" if section else key
        if name in SECTIONS:
            if isinstance(value, dict):
                yield from _flat(value, name)
            elif value is not None:
                raise ValueError(f"{name} must be an object, {{…}}, not {json.dumps(value)}")
        elif key not in TABLE[section]:
            raise ValueError(f"DeepSpeed has no key {name}{_place_of(key, section)}")
        elif not is_off or key in ("enabled", "device"):
            yield name, value


def _place_of(key: str, section: str) -> str:
    """Where a key belongs, or which one was meant."""
    elsewhere = next((other for other, rows in TABLE.items() if key in rows), None)
    if elsewhere is not None:
        return f": {key} belongs {f'into {elsewhere}' if elsewhere else 'outside of sections'}"
    names = [*TABLE[section], *(name.rpartition(".")[2] for name in SECTIONS
                                if name.rpartition(".")[0] == section)]
    return meant(key, names)


def row_of(name: str) -> Key:
    """Its row in the table."""
    section, _, key = name.rpartition(".")
    return TABLE[section][key]
