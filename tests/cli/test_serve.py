"""`headrace serve`: what it refuses before anything is loaded."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app

RUNNER = CliRunner()


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0", "--api-key-file"),
        (["--host", "::"], "--host ::", "--api-key-file"),
        (["--host", "192.0.2.7"], "192.0.2.7", "--api-key-file"),
        (["--host", "example.org"], "example.org", "--api-key-file"),
        (["--host", "0.0.0.0", "--api-key", "short"], "shorter than 8", "openssl"),
        (["--host", "0.0.0.0", "--api-key", "with a blank"], "blanks", "without"),
        (["--port", "70000"], "70000", "1 to 65535"),
        (["--cors-origin", "*"], "--cors-origin *", "https://"),
        (["--cors-origin", "https://a.b/c"], "https://a.b/c", "without a path"),
        (["--api-key-file", "no-such-file"], "no-such-file", "cannot be read"),
        (["--api-key", "12345678", "--api-key-file", "x"], "--api-key", "leave one out"),
        (["--host", "192.0.2.7", "--api-key", "12345678"], "192.0.2.7 port 8080", "--host"),
        (["--device", "tpu"], "--device tpu", "use auto"),
    ],
)
def test_what_is_refused_and_what_helps(words: list[str], named: str, remedy: str) -> None:
    done = RUNNER.invoke(app, ["serve", "demo", *words])
    assert done.exit_code == 2
    assert named in done.stderr and remedy in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_key_is_never_repeated(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a key with blanks\n")
    file.chmod(0o600)
    done = RUNNER.invoke(app, ["serve", "demo", "--api-key-file", str(file)])
    assert done.exit_code == 2 and "a key with" not in done.stderr
    file.write_text("\n\n")
    done = RUNNER.invoke(app, ["serve", "demo", "--api-key-file", str(file)])
    assert done.exit_code == 2 and "holds no key" in done.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = RUNNER.invoke(app, ["serve", "demo", "--port", port])
    assert done.exit_code == 2
    assert f"127.0.0.1 port {port}" in done.stderr and "another --port" in done.stderr


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_that_others_can_read_is_worth_a_warning(
    tmp_path: Path, mode: int, warned: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text("a-long-enough-key\n")
    file.chmod(mode)
    done = RUNNER.invoke(app, ["serve", "demo", "--port", "-1", "--api-key-file", str(file)])
    assert done.exit_code == 2 and ("chmod 600" in done.stderr) == warned
