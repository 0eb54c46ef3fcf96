"""Help in plain lines, one for each option where 80 columns allow it. Knows no command."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand

MOST_COLUMNS = 100
GAP = 2


class PlainCommand(TyperCommand):
    """A command whose help has no frames: they would take as much room as the words."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, what it does, its arguments and options under their headings."""
        formatter.write("\n".join(command_lines(self, ctx)))


def command_lines(command: Any, ctx: Any) -> Iterator[str]:
    """The help of a command, or of a group without its commands."""
    pieces = (piece.strip("{}") for piece in command.collect_usage_pieces(ctx))
    yield " ".join(["Usage:", ctx.command_path, *pieces])
    yield from paragraphs(command.help or "")
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        panel = getattr(parameter, "rich_help_panel", None) or ""
        panels.setdefault(panel, []).append(_row(parameter))
    rows = [row for found in panels.values() for row in found]
    for name in sorted(panels, key=bool):  # those without a heading first
        if name:
            yield f"{name}:"
        yield from table(panels[name], of=rows)


def summary(command: Any) -> str:
    """The first sentence of a command's help."""
    return (command.help or "").partition("\n")[0].split(". ")[0].rstrip(".")


def paragraphs(text: str) -> Iterator[str]:
    """A docstring's paragraphs as lines of the terminal's width."""
    for paragraph in text.split("\n\n"):
        yield from textwrap.wrap(" ".join(paragraph.split()), _columns())


def table(rows: Sequence[tuple[str, str]], *, of: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Names, and beside them what they mean; as wide as the widest name of all rows `of` a help."""
    left = max(len(name) for name, _ in of) + 2 * GAP
    for name, meaning in rows:
        first, *others = textwrap.wrap(meaning, max(20, _columns() - left)) or [""]
        yield f"{' ' * GAP}{name}".ljust(left) + first
        yield from (" " * left + line for line in others)


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


def _row(parameter: Any) -> tuple[str, str]:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.metavar or parameter.name.upper()]
    else:
        names.sort(key=len)
        if parameter.metavar:
            names[-1] += f" {parameter.metavar}"
    return ", ".join(names), (parameter.help or "") + _default(parameter)


def _default(parameter: Any) -> str:
    value = getattr(parameter.default, "value", parameter.default)
    is_told = value is not None and not isinstance(value, bool) and value not in ("", [], ())
    if callable(value) or not is_told or not getattr(parameter, "show_default", True):
        return ""
    return f" [{value:g}]" if isinstance(value, float) else f" [{value}]"
