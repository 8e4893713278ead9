"""Markup: pieces of HTML in which all text is escaped, unless it was made here."""

import html


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children, **attributes) -> Html:
    """An element. Children are Html, or text, which is escaped; None is left out. An attribute's name may end in _, and
    has - for _ inside; True stands for the bare name."""
    given = "".join(f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
                    for key, value in attributes.items() if value is not None and value is not False)
    return Html(f"<{name}{given}>{text(*children)}</{name}>")


def text(*children) -> Html:
    """Several pieces, one after the other."""
    return Html("".join(child if isinstance(child, Html) else html.escape(str(child)) for child in children
                        if child is not None))
