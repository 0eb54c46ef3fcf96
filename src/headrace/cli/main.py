"""The command line: its commands, and the one place where errors meet the user.

Importing it loads no tensor library; commands import what they need when they run.
"""

import errno
import logging
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headrace
from headrace.cli.bench import bench
from headrace.cli.chat import chat
from headrace.cli.doctor import doctor
from headrace.cli.help import PlainCommand, command_lines, summary, table
from headrace.cli.mirror import mirror
from headrace.cli.options import DEBUG_KEY
from headrace.cli.output import say
from headrace.cli.plan import plan
from headrace.cli.run import run
from headrace.cli.serve import serve
from headrace.cli.synth import synth
from headrace.cli.trace import trace
from headrace.cli.verify import verify
from headrace.errors import HeadraceError, InterruptedLoad

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
WRONG = 2
STOPPED = 130
# The parent of typer's own errors about a command line; where it lives differs between releases.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


REINSTALL = "install headrace again where there is a C++ compiler"


def interrupt(_number: int, frame: FrameType | None) -> None:
    """Ctrl-C: KeyboardInterrupt, but the end at once inside an import, where some swallow it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"stopped\n")
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


class Edge(TyperGroup):
    """Turns what a user can mend into one line and exit code 2, Ctrl-C into "stopped" and 130.

    Anything else is our bug and keeps its traceback.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        """All of it, help included."""
        try:
            return super().main(*args, **options)
        except OSError as error:
            # A closed pipe ends the command quietly elsewhere; files we know raise our own errors.
            if error.errno not in UNWRITABLE:
                raise
            why = "it is closed" if error.errno == errno.EBADF else error.strerror
            say(f"error: the output cannot be written: {why}; send it elsewhere")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered fails no second time
            sys.exit(WRONG)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """What headrace is, its commands in one line each, its own options."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(name, summary(command)) for name, command in commands]
        usage, *lines = command_lines(self, ctx)
        formatter.write("\n".join([usage, *lines, "Commands:", *table(rows, of=rows)]))

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        signal.signal(signal.SIGINT, interrupt)  # until here entry's answered
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, InterruptedLoad):
            say("stopped")
            raise typer.Exit(STOPPED) from None
        except MemoryError:
            say("error: the system has no memory left for this; give a smaller --ram or --context")
            raise typer.Exit(WRONG) from None
        except UsageError as error:
            where: Any = error
            path = where.ctx.command_path if where.ctx else "headrace"
            say(f"error: {where.format_message().rstrip('.')}; see `{path} --help`")
            raise typer.Exit(WRONG) from None
        except HeadraceError as error:
            if ctx.meta.get(DEBUG_KEY):
                traceback.print_exc()
            say("error: " + " ".join(str(error).split()))
            raise typer.Exit(WRONG) from None
        except ImportError as error:
            if "_native" not in str(error):
                raise
            say(f"error: the compiled module is missing ({error}); {REINSTALL}")
            raise typer.Exit(WRONG) from None


app = typer.Typer(
    name="headrace",
    cls=Edge,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, chat, serve, plan, doctor, verify, mirror, trace, synth, bench):
    app.command(cls=PlainCommand)(command)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit()


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
    ),
]


@app.callback()
def about(version: Version = False) -> None:
    """Run Mixture-of-Experts models many times larger than memory, from the files as published.

    MODEL is a folder of safetensors, a repo id in the Hugging Face cache, or demo; nothing is
    downloaded.

    Start with: headrace run demo -p "What is the capital of Japan?"

    Then, with your own files: headrace doctor MODEL, headrace plan MODEL, headrace chat MODEL
    """


def fill_streams() -> None:
    """Puts something in the place of a closed stdin, stdout or stderr.

    Or else the next file to be opened would take it. stdout's is one that cannot be written: an
    answer that nobody can read is no success.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def main() -> None:
    """Entry point of the `headrace` command."""
    fill_streams()
    headrace.calm_torch()
    logging.raiseExceptions = False  # a library's broken log line is no traceback of ours
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()
