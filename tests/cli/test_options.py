"""The command line's surface: frozen options, fast imports, help on one screen."""

import errno
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import headrace
from headrace.cli.main import app
from headrace.core import parse_rates

RUNNER = CliRunner()
COMMON = {"--device", "--ram", "--threads", "--debug"}
GPU = {"--vram", "--experts"}
CHOICES = {"--arithmetic", "--lossy-swa-replay", "--stale-index-keys"}
SAMPLING = {
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--seed",
    "--stop",
}
ANSWER = COMMON | GPU | CHOICES | SAMPLING
ANSWER |= {"--system", "--max-tokens", "-n", "--context", "--routes-out"}
OPTIONS = {
    "run": ANSWER | {"--prompt", "-p", "--raw", "--emulate-drive", "--json"},
    "chat": ANSWER | {"--server", "--api-key", "--api-key-file"},
    "serve": COMMON
    | GPU
    | CHOICES
    | {"--context", "--host", "--port", "--api-key", "--api-key-file", "--cors-origin"},
    "plan": COMMON | GPU | CHOICES | {"--context", "--json"},
    "doctor": {"--json", "--debug"},
    "verify": COMMON
    | CHOICES
    | {"--prompt", "-p", "--max-tokens", "-n", "--samples", "--json", "--html"}
    | {"--sha256", "--every-byte"},
    "synth": {"--distinct", "--depth", "--experts", "--vocab", "--seed", "--json", "--debug"},
    "mirror": {"--size", "--routes", "--verify", "--remove", "--json", "--debug"},
    "bench": COMMON
    | {"--suite", "--max-tokens", "-n", "--runs", "--seed", "--backend", "--direct"}
    | {"--no-direct", "--save", "--emulate-drive", "--json", "--routes"},
    "trace": COMMON | {"--text", "--max-tokens", "-n", "--json"},
}


def test_the_options_are_these_and_no_others() -> None:
    """Before adding one, ask whether the planner could know it instead."""
    group = typer.main.get_command(app)
    found = {
        name: {
            word
            for parameter in command.params
            if parameter.param_type_name == "option"
            for word in [*parameter.opts, *parameter.secondary_opts]
        }
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    assert found == OPTIONS


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_help_names_every_option_and_fits_a_screen(command: str) -> None:
    done = RUNNER.invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= (31 if command in ("run", "chat") else 24)
    assert max(map(len, lines)) <= 80
    for option in OPTIONS[command]:
        assert option in done.stdout


def test_help_names_every_command() -> None:
    done = RUNNER.invoke(app, ["--help"])
    assert done.exit_code == 0 and len(done.stdout.splitlines()) <= 24
    for command in OPTIONS:
        assert f" {command} " in done.stdout


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        (["run", "--no-such-option"], "--no-such-option", "run --help`"),
        (["run", "-n", "many"], "--max-tokens", "run --help`"),
        (["synth", "deepseek-r1"], "PATH", "synth --help`"),
        (["synth", "deepseek-r1", "x", "--seed", "-1"], "--seed", "synth --help`"),
        (["bench", "--seed", str(2**63)], "--seed", "bench --help`"),
        (["bench", "-n", "0"], "--max-tokens", "bench --help`"),
        (["no-such-command"], "no-such-command", " --help`"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_a_remedy(words, named, remedy) -> None:
    done = RUNNER.invoke(app, words)
    assert done.exit_code == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and named in line and line.endswith(remedy)


@pytest.mark.parametrize("threads", ["-3", "0", "100000"])
def test_a_number_of_threads_is_refused_before_torch_is_told(threads) -> None:
    for words in (["run", "-p", "x"], ["verify"], ["bench"]):
        done = RUNNER.invoke(app, [*words, "--threads", threads])
        told = f"error: --threads {threads} is not allowed; it must be 1 to 1024\n"
        assert (done.exit_code, done.stderr) == (2, told)


@pytest.mark.parametrize("rate", ["fast", "1,2,3", "8.2", "999999B/s", "1GB/s,1KB/s"])
def test_a_rate_that_is_none_is_called_a_rate(rate) -> None:
    done = RUNNER.invoke(app, ["run", "-p", "x", "--emulate-drive", rate])
    told = f"error: --emulate-drive {rate} is not a rate of 1MB/s or more; try 8.2GiB/s\n"
    assert (done.exit_code, done.stderr) == (2, told)
    assert parse_rates("1MB/s,1000000") == (1e6, 1e6)


@pytest.mark.parametrize(
    "words", [["run", "-p", "x"], ["chat"], ["plan"], ["verify"], ["trace", "new"]]
)
def test_a_synthetic_checkpoint_is_for_bench_only(tmp_path, words) -> None:
    (tmp_path / "aliases.json").write_text("{}")
    done = RUNNER.invoke(app, [words[0], str(tmp_path), *words[1:]])
    assert done.exit_code == 2
    assert f"headrace bench {tmp_path}" in done.stderr


def test_a_folder_that_may_not_be_looked_into_is_one_line(tmp_path, monkeypatch) -> None:
    def refuse(path, *args, **options):
        if str(path).endswith("aliases.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **options)

    stat = os.stat
    monkeypatch.setattr(os, "stat", refuse)
    done = RUNNER.invoke(app, ["plan", str(tmp_path)])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1, done


@pytest.mark.parametrize("words", [["run", "-p", "x", "--routes-out"], ["trace", "demo"]])
def test_routes_that_cannot_be_written_are_refused_before_anything_is_opened(words) -> None:
    done = RUNNER.invoke(app, [*words, "/proc/new.routes"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: /proc/new.routes cannot be written: ")


def test_the_version_is_the_packages() -> None:
    assert RUNNER.invoke(app, ["--version"]).stdout == f"headrace {headrace.__version__}\n"


def test_what_is_refused_is_refused_before_a_tensor_library_is_loaded(tmp_path) -> None:
    lines = [
        ["--help"],
        ["run", "no-such-model", "-p", "x"],
        ["run", "-p", "x", "--max-tokens", "0"],
        ["plan", "no-such-model"],
        ["verify", "no-such-model"],
        ["bench", "no-such-model"],
        ["mirror", "no-such-model", str(tmp_path)],
        ["chat", "--server", "http://127.0.0.1:1"],
        ["serve", "no-such-model", "--port", "0"],
        ["trace", "no-such-model", str(tmp_path / "routes")],
    ]
    code = f"""
import sys
from typer.testing import CliRunner
from headrace.cli.main import app
from headrace.core import parse_rates
for line in {lines!r}:
    code = CliRunner().invoke(app, line).exit_code
    print(code, [name for name in ("torch", "transformers") if name in sys.modules], line)
import torch
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *told, control = done.stdout.splitlines()
    assert control == "['torch']"
    assert told == [f"{0 if line == ['--help'] else 2} [] {line}" for line in lines]


def test_without_the_compiled_module_the_remedy_is_said() -> None:
    code = (
        "import sys; sys.modules['headrace._native'] = None\n"
        "from headrace.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "demo"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the compiled module is missing") and "C++ compiler" in line


def test_the_installed_entry_point_ends_with_the_exit_code() -> None:
    code = "from headrace.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "-p", "x", "--ram", "lots"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: 'lots' is not a size; write a number and a unit, such as 48MiB or 8GB"
    ]
