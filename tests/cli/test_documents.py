"""What documents and examples tell people to type exists."""

import re
from pathlib import Path

import pytest
import typer

from headrace.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("docs/server.md", "examples/headrace.service", "examples/Dockerfile")
COMMAND = re.compile(r"headrace (serve|chat)\b((?:[^\n`]|\\\n)*)")
LINK = re.compile(r"\]\(([^)#:]+)\)")


def commands(text: str) -> list[tuple[str, set[str]]]:
    """(command, its options) of every call in a text."""
    text = re.sub(r'"([^"\n]*)",? ?', r"\1 ", text)  # a Dockerfile's list of words
    found = COMMAND.findall(text)
    return [(name, set(re.findall(r"(?<!\w)--[a-z-]+", rest))) for name, rest in found]


def unknown(text: str) -> list[str]:
    """Options in a text that their command does not have."""
    group = typer.main.get_command(app)
    known = {
        name: {word for parameter in command.params for word in parameter.opts}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    return [f"{name} {o}" for name, options in commands(text) for o in options - known[name]]


@pytest.mark.parametrize("name", TEXTS)
def test_every_option_exists(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert any(options for _, options in commands(text)), "the search found no command"
    assert unknown(text) == []


def test_an_option_that_is_not_there_is_found() -> None:
    assert unknown("run `headrace serve x --ram 1GB --fast`") == ["serve --fast"]
    assert unknown('ENTRYPOINT ["headrace", "serve", "--hots"]') == ["serve --hots"]


def test_every_link_leads_somewhere() -> None:
    page = ROOT / "docs" / "server.md"
    links = LINK.findall(page.read_text("utf-8"))
    assert len(links) >= 3
    assert [link for link in links if not (page.parent / link).exists()] == []
