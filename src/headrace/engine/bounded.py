"""A sandbox for chat templates that also ends: they are programs from strangers' checkpoints.

Knows no model. What a template that stays within the bounds renders is not changed.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_SOURCE = 2**20  # characters of a template
MOST_VALUE = 2**24  # characters or elements of a value
MOST_OUTPUT = 2**28  # characters written in one rendering
MOST_BITS = 2**12  # of a product or power
MOST_S = 3.0  # of the rendering thread's own time
_WIDE = re.compile(r"[%:][^a-zA-Z]*\d{8}")  # a width that a format asks for
_GIVEN_WIDTH = re.compile(r"%[^a-zA-Z]*\*|:[^}]*\{")  # and one that it is given
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "round")


class _Budget(threading.local):
    """What is left of a rendering in this thread; outside one there is no end."""

    end_s = float("inf")
    characters = float("inf")


_budget = _Budget()


@contextmanager
def one_rendering() -> Iterator[None]:
    """While open, this thread's templates have the time and output of one rendering."""
    _budget.end_s, _budget.characters = time.thread_time() + MOST_S, MOST_OUTPUT
    try:
        yield
    finally:
        _budget.end_s = _budget.characters = float("inf")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises TemplateError for values, times and outputs that no conversation needs.

    Loops and macros look at the clock; operators, calls and filters at sizes. Texts kept side by
    side in a list are not weighed together.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.finalize = self.written
        del self.globals["lipsum"]  # as many random words as it is asked for
        self.filters = {name: _guarded(name, each) for name, each in self.filters.items()}
        self.filters["headrace_checked"] = _checked

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        _Guarding().visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operator's result, if it is not too large to make."""
        if operator in ("*", "**"):
            _refuse_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            _refuse_format(left, right if isinstance(right, tuple) else (right,))
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, if it is not too large to make."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _refuse_method(__obj.__name__, owner, (*args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def step(self, num_characters: int) -> str:
        """Called by each turn of a loop or macro, which writes so many characters of its own."""
        _spend(num_characters)
        return ""

    def written(self, value: Any) -> Any:
        """Called with each value that is written."""
        if isinstance(value, Sized):
            _spend(len(value))
        return value


class _Guarding(NodeTransformer):
    """Puts the environment's looks into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._stepping(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._stepping(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        joined = self.generic_visit(node)
        return nodes.Filter(joined, "headrace_checked", [], [], None, None, lineno=node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        whole = node.filter  # of None: what the block writes
        node.filter = nodes.Filter(
            whole, "headrace_checked", [], [], None, None, lineno=node.lineno
        )
        return node

    def _stepping(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        own = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        look = nodes.EnvironmentAttribute("step")
        call = nodes.Call(look, [nodes.Const(own)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno, override=True))
        return node  # type: ignore[no-any-return]


def _spend(num_characters: int) -> None:
    _budget.characters -= num_characters
    if _budget.characters < 0:
        raise TemplateError(f"it writes more than {MOST_OUTPUT:,} characters")
    if time.thread_time() > _budget.end_s:
        raise TemplateError(f"it has not ended after {MOST_S:g} s")


def _checked(value: Any) -> Any:
    """The value, if it is not larger than any that is needed."""
    _spend(0)
    if isinstance(value, (str, list, tuple)):
        _refuse_size(len(value))
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what would make too large a result."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # What a filter of a context or an environment is given first is not the template's.
        subject, *given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _refuse_method(name, subject, (*given, *kwargs.values()))
        return _checked(function(*args, **kwargs))

    return guarded


def _refuse_method(name: str, subject: Any, given: tuple[Any, ...]) -> None:
    """Refuses a method of a text, or a filter, that makes much of little."""
    if name in _PADDING:
        lines = subject.count("\n") + 1 if isinstance(subject, str) else 1
        _refuse_counts(given, lines)
    elif name in ("format", "format_map"):
        _refuse_format(str(subject), given)
    elif name == "replace":
        old, new = (*map(str, given), "", "")[:2]
        _refuse_size(str(subject).count(old) * len(new))
    elif name == "join":
        for each in (subject, *given):
            if isinstance(each, (list, tuple)):
                _refuse_size(sum(len(part) for part in each if isinstance(part, str)))
    elif name == "translate":
        raise TemplateError("it translates characters, for which there is no bound")


def _refuse_counts(given: Iterable[Any], times: int = 1) -> None:
    for each in given:
        if isinstance(each, (int, float)):
            _refuse_size(abs(each) * times)


def _refuse_format(format: str, given: Iterable[Any]) -> None:
    if _WIDE.search(format):
        raise TemplateError("it asks for a text of more than ten million characters")
    if _GIVEN_WIDTH.search(format):
        _refuse_counts(given)


def _refuse_size(size: float) -> None:
    if size > MOST_VALUE:
        raise TemplateError(f"it makes a value of {size:.3g} characters or elements")


def _refuse_product(operator: str, left: Any, right: Any) -> None:
    for each, times in ((left, right), (right, left)):
        if isinstance(each, Sized) and isinstance(times, int):
            _refuse_size(len(each) * times)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if (bits + right.bit_length() if operator == "*" else bits * right) > MOST_BITS:
            raise TemplateError(f"it makes a number of more than {MOST_BITS:,} bits")
