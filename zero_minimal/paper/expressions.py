"""Expressions: a formula that is called with unknowns writes itself down, so that a page can calculate with it.

    with writing() as book:
        h, layers = book.unknown("hidden"), book.unknown("layers")
        book.write(12 * layers * h**2)      # the number of its last node
        book.nodes                          # ("input", "hidden"), ("input", "layers"), ("number", 12), ("*", 2, 1), …

Nothing is typed twice: what Python calculates with numbers, a page calculates with these nodes. Where a formula asks
whether an unknown is greater than another, both answers are followed, and an "if" node chooses between the results.
`exported` marks the functions that ask. A mark bounds the work: what follows a marked call is not followed twice.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

OPERATIONS: dict[str, Callable] = {  # of nodes, beside "input", "number" and "if"
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "floor": math.floor,
    "<": operator.lt, "<=": operator.le, "=": operator.eq,
}


_open: ContextVar["Book | None"] = ContextVar("book", default=None)


class Book:
    """Expressions, node by node: (operation, its arguments' numbers), each once."""

    def __init__(self):
        self.nodes: list[tuple] = []
        self.numbers: dict[tuple, int] = {}
        self.known: dict[int, bool] = {}  # what conditions are taken to be, on the way that is followed now

    def unknown(self, name: str) -> "Symbol":
        """A number that the page knows."""
        return self.node("input", name)

    def node(self, operation: str, *arguments) -> "Symbol":
        """The node, made if it is not there yet."""
        key = (operation, *((type(one), one) for one in arguments))  # 1 is no True
        if key not in self.numbers:
            self.numbers[key] = len(self.nodes)
            self.nodes.append((operation, *arguments))
        return Symbol(self, self.numbers[key])

    def write(self, value: Any) -> int:
        """The number of the node of a Symbol, or of anything else that JSON has."""
        return value.number if isinstance(value, Symbol) else self.node("number", value).number

    def choose(self, condition: "Symbol", yes: Any, no: Any) -> Any:
        """What two ways led to, as one: dicts, lists and dataclasses part by part."""
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
        """What a function returns, on all ways through it."""
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
    """A formula asks whether this is so."""

    def __init__(self, condition: "Symbol"):
        self.condition = condition


class Symbol:
    """A number that is not known yet: what is done with it is written down."""

    __hash__ = object.__hash__

    def __init__(self, book: Book, number: int):
        self.book, self.number = book, number

    def _write(self, operation: str, *arguments: Any) -> "Symbol":
        return self.book.node(operation, *map(self.book.write, arguments))

    def __add__(self, other):
        return self if _is(other, 0) else self._write("+", self, other)

    def __radd__(self, other):
        return self if _is(other, 0) else self._write("+", other, self)

    def __sub__(self, other):
        return self._write("-", self, other)

    def __rsub__(self, other):
        return self._write("-", other, self)

    def __mul__(self, other):
        return self if _is(other, 1) else self._write("*", self, other)

    def __rmul__(self, other):
        return self if _is(other, 1) else self._write("*", other, self)

    def __truediv__(self, other):
        return self if _is(other, 1) else self._write("/", self, other)

    def __rtruediv__(self, other):
        return self._write("/", other, self)

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
        """A page has one kind of number: nothing is to be rounded to be whole."""
        return self

    def __lt__(self, other):
        return self._write("<", self, other)

    def __le__(self, other):
        return self._write("<=", self, other)

    def __gt__(self, other):
        return self._write("<", other, self)

    def __ge__(self, other):
        return self._write("<=", other, self)

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
    """A formula that asks: while a book is open, it is followed on all its ways."""

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


def evaluate(nodes: list, number: int, inputs: dict[str, float], values: dict[int, Any] | None = None) -> Any:
    """The value of a node, as a page calculates it. values: those that are known already; filled."""
    values = {} if values is None else values
    if number not in values:
        operation, *arguments = nodes[number]
        if operation == "input":
            values[number] = inputs[arguments[0]]
        elif operation == "number":
            values[number] = arguments[0]
        elif operation == "if":  # only the way that is taken: the other may divide by 0
            condition, yes, no = arguments
            taken = yes if evaluate(nodes, condition, inputs, values) else no
            values[number] = evaluate(nodes, taken, inputs, values)
        else:
            values[number] = OPERATIONS[operation](
                *(evaluate(nodes, argument, inputs, values) for argument in arguments))
    return values[number]


def _is(value: Any, number: int) -> bool:
    return not isinstance(value, Symbol) and value == number
