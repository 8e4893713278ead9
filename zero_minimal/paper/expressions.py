"""Expressions: a formula that is called with unknowns records its operations, so that a web page can evaluate it.

    with writing() as book:
        h, layers = book.unknown("hidden"), book.unknown("layers")
        book.write(12 * layers * h**2)      # the number of its last node
        book.nodes                          # ("input", "hidden"), ("input", "layers"), ("number", 12), ("*", 2, 1), …

So no formula is written twice: Python evaluates it with numbers, a page with these nodes. Where a formula compares
unknowns, both branches are followed, and an "if" node chooses between their results. `exported` marks the functions
that compare. It limits the work: code after a marked call is not followed twice.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_open: ContextVar["Book | None"] = ContextVar("book", default=None)


class Book:
    """A list of nodes, each of them (operation, *arguments) and listed once."""

    def __init__(self):
        self.nodes: list[tuple] = []
        self.numbers: dict[tuple, int] = {}
        self.known: dict[int, bool] = {}  # the value assumed for each condition on the current branch

    def unknown(self, name: str) -> "Symbol":
        """An input: a number that the page knows."""
        return self.node("input", name)

    def node(self, operation: str, *arguments) -> "Symbol":
        """This node, added if it does not exist yet."""
        key = (operation, *((type(one), one) for one in arguments))  # 1 is not True
        if key not in self.numbers:
            self.numbers[key] = len(self.nodes)
            self.nodes.append((operation, *arguments))
        return Symbol(self, self.numbers[key])

    def write(self, value: Any) -> int:
        """The number of the node of a Symbol, or of anything else that JSON has."""
        return value.number if isinstance(value, Symbol) else self.node("number", value).number

    def choose(self, condition: "Symbol", yes: Any, no: Any) -> Any:
        """Merge the results of two branches; dicts, lists and dataclasses are merged part by part."""
        if type(yes) is type(no) and isinstance(yes, dict):
            return {key: self.choose(condition, yes[key], no[key]) for key in yes}
        if type(yes) is type(no) and isinstance(yes, list):
            return [self.choose(condition, *pair) for pair in zip(yes, no, strict=True)]
        if type(yes) is type(no) and dataclasses.is_dataclass(yes):
            return type(yes)(*(self.choose(condition, getattr(yes, field.name), getattr(no, field.name))
                               for field in dataclasses.fields(yes)))
        first, second = self.write(yes), self.write(no)
        return yes if first == second else self.node("if", condition.number, first, second)

    def follow(self, function: Callable[[], Any]) -> Any:
        """The result of a function, merged from all branches through it."""
        outside = self.known
        try:
            return function()
        except Undecided as asked:
            condition = asked.condition
        ways = []
        for answer in (True, False):
            self.known = outside | {condition.number: answer}
            ways.append(self.follow(function))
        self.known = outside
        return self.choose(condition, *ways)


class Undecided(Exception):
    """A formula needs the value of this condition."""

    def __init__(self, condition: "Symbol"):
        self.condition = condition


def _writes(operation: str, neutral: int | None = None, turned: bool = False) -> Callable:
    """A method of Symbol that records this operation; `turned`: with the other operand first. If the other operand is
    `neutral`, nothing is recorded."""

    def method(self, other):
        if not isinstance(other, Symbol) and other == neutral:
            return self
        return self._write(operation, *((other, self) if turned else (self, other)))

    return method


class Symbol:
    """A number that is not known yet; operations on it are recorded in its book."""

    __hash__ = object.__hash__

    def __init__(self, book: Book, number: int):
        self.book, self.number = book, number

    def _write(self, operation: str, *arguments: Any) -> "Symbol":
        return self.book.node(operation, *map(self.book.write, arguments))

    __add__, __radd__ = _writes("+", 0), _writes("+", 0, turned=True)
    __sub__, __rsub__ = _writes("-"), _writes("-", turned=True)
    __mul__, __rmul__ = _writes("*", 1), _writes("*", 1, turned=True)
    __truediv__, __rtruediv__ = _writes("/", 1), _writes("/", turned=True)
    __lt__, __gt__ = _writes("<"), _writes("<", turned=True)
    __le__, __ge__ = _writes("<="), _writes("<=", turned=True)

    def __floordiv__(self, other):
        return math.floor(self / other)

    def __neg__(self):
        return self._write("*", -1, self)

    def __pow__(self, power: int):
        return functools.reduce(operator.mul, [self] * power)

    def __floor__(self):
        return self._write("floor", self)

    def __ceil__(self):
        return -self._write("floor", -self)

    def __round__(self):
        """A page has one type of number, so nothing is rounded."""
        return self

    def __eq__(self, other):
        return isinstance(other, Symbol) and other.number == self.number or self._write("=", self, other)

    def __ne__(self, other):
        return not self == other

    def __bool__(self):
        try:
            return self.book.known[self.number]
        except KeyError:
            raise Undecided(self) from None


def exported(function: Callable) -> Callable:
    """Decorates a formula that compares: while a book is open, all its branches are followed."""

    @functools.wraps(function)
    def followed(*arguments, **options):
        book = _open.get()
        return function(*arguments, **options) if book is None else book.follow(lambda: function(*arguments, **options))

    return followed


@contextlib.contextmanager
def writing() -> Iterator[Book]:
    """Context with an open book, in which formulas may be called with its unknowns."""
    book = Book()
    token = _open.set(book)
    try:
        yield book
    finally:
        _open.reset(token)
