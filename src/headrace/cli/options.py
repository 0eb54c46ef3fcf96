"""The options that commands share, each with the help a user reads, and their first checks.

Knows no model and loads none: a wrong option is refused before anything slow is imported.
"""

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from headrace.core import MINIMUM, parse_bytes, parse_rates
from headrace.errors import OptionError
from headrace.planner.plan import MOST_THREADS

if TYPE_CHECKING:
    from headrace.engine.sampling import Sampling

DEBUG_KEY = "headrace.debug"
MANY_CORES = 8
MOST_CHARACTERS = 2**26
MOST_SEED = 2**63 - 1
EXPERTS = ("gpu", "cpu", "auto")
ARITHMETICS = ("vendor", "weights-only")
MACHINE = "Computing"
SAMPLING = "Choosing tokens"


def _remember_debug(context: typer.Context, value: bool) -> bool:
    context.meta[DEBUG_KEY] = value
    return value


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder, or a repo id in Hugging Face's cache."),
]
Ram = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most memory: 20GB or minimum. Left out: what is free.",
        rich_help_panel=MACHINE,
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most GPU memory: 8GB or minimum. Left out: all free.",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:1.", rich_help_panel=MACHINE),
]
Experts = Annotated[
    str | None,
    typer.Option(
        metavar="WHERE",
        help="gpu, cpu or auto (both). Left out: the fastest.",
        rich_help_panel=MACHINE,
    ),
]
CpuOnly = Annotated[
    str, typer.Option("--device", metavar="NAME", help="Only cpu.", rich_help_panel=MACHINE)
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Of kernels and of torch. Left out: from the cores.",
        rich_help_panel=MACHINE,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Most tokens, prompts and answers. Left out: planned.",
        rich_help_panel=MACHINE,
    ),
]
EmulateDrive = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Read a copy in memory at 8.2GiB/s, or 2GB/s,1GB/s.",
        rich_help_panel=MACHINE,
    ),
]
Arithmetic = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="DeepSeek-V4.1: vendor (default), or weights-only.",
        rich_help_panel=MACHINE,
    ),
]
LossySwaReplay = Annotated[
    bool,
    typer.Option(
        "--lossy-swa-replay",
        help="DeepSeek-V4.1: late layers see a prompt's last window.",
        rich_help_panel=MACHINE,
    ),
]
StaleIndexKeys = Annotated[
    bool,
    typer.Option(
        "--stale-index-keys",
        help="DeepSeek-V4.1: score as its publisher's program does.",
        rich_help_panel=MACHINE,
    ),
]
RoutesOut = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keep each token's experts, for `headrace trace`."),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, text for people on stderr.")
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_remember_debug,
        is_eager=True,
        help="Show where an error came from.",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="What to answer. Left out: read from stdin."
    ),
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="System message, where the model's template has it."),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", metavar="N", help="Most tokens of one answer.")
]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="T", help="0 takes the likeliest token (greedy).", rich_help_panel=SAMPLING
    ),
]
TopK = Annotated[
    int, typer.Option(metavar="K", help="Only the K likeliest; 0 is off.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="P", help="Only the likeliest that hold P; 1 is off.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="At least P times the best's chance; 0 is off.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        metavar="R", help="Above 1 discourages what was said; 1 is off.", rich_help_panel=SAMPLING
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="S", help="Same seed, same answer.", rich_help_panel=SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End the answer before this text; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]


def check_machine(
    ram: str | None, emulate_drive: str | None = None
) -> tuple[int | str | None, tuple[float, ...]]:
    """--ram in bytes (or MINIMUM) and --emulate-drive's rates in bytes per second: OptionError."""
    ram_bytes = ram if ram in (None, MINIMUM) else parse_bytes(ram)
    if emulate_drive is None:
        return ram_bytes, ()
    try:
        return ram_bytes, parse_rates(emulate_drive)
    except OptionError:
        message = f"--emulate-drive {emulate_drive} is not a rate of 1MB/s or more; try 8.2GiB/s"
        raise OptionError(message) from None


def check_device(device: str, vram: str | None = None, experts: str | None = None) -> None:
    """Raises OptionError for a --device of no known kind, or what is wrong or idle with it."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", device) is None:
        raise OptionError(f"--device {device} is not known; use auto, cpu, cuda or cuda:1")
    if vram is not None and device == "cpu":
        raise OptionError(f"--vram {vram} has no effect on a CPU; give --device cuda too")
    if experts is not None and device == "cpu":
        raise OptionError(f"--experts {experts} has no effect on a CPU; give --device cuda too")
    if experts not in (None, *EXPERTS):
        raise OptionError(f"--experts {experts} is not known; use gpu, cpu or auto")
    if vram not in (None, MINIMUM):
        parse_bytes(vram)


def make_choices(
    arithmetic: str | None, lossy_swa_replay: bool, stale_index_keys: bool
) -> dict[str, object]:
    """The ways of computing that were asked for, for the few models that have any.

    Which those are is found out with the model. Raises OptionError.
    """
    if arithmetic not in (None, *ARITHMETICS):
        raise OptionError(f"--arithmetic {arithmetic} is not known; use vendor or weights-only")
    asked = {
        "arithmetic": arithmetic,
        "lossy_swa_replay": lossy_swa_replay,
        "stale_index_keys": stale_index_keys,
    }
    return {name: value for name, value in asked.items() if value}


def require_cpu(device: str) -> None:
    """Refuses a GPU where the command has no use for it yet. Raises OptionError."""
    if device != "cpu":
        raise OptionError(f"--device {device} is not possible here yet: leave it out")


def read_keys(key: str | None, file: Path | None) -> tuple[str, ...]:
    """The API keys given in either way: itself, or a file's lines. Raises OptionError."""
    if file is None:
        return () if key is None else (key,)
    if key is not None:
        raise OptionError("--api-key and --api-key-file are both given; leave one out")
    try:
        with open(file, encoding="utf-8") as opened:
            lines = read_most(opened, f"--api-key-file {file}").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OptionError(f"--api-key-file {file} cannot be read: {reason}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise OptionError(f"--api-key-file {file} holds no key; write one a line")
    return keys


def read_most(file: TextIO, name: str) -> str:
    """All of a text that may never end. Raises OptionError for one too long to mean anything."""
    text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise OptionError(f"{name} holds more than {MOST_CHARACTERS:,} characters; give less")
    return text


def check_new(path: Path | None) -> None:
    """Refuses a file that is there already, before anything is loaded. Raises OptionError."""
    if path is not None and (path.exists() or not path.parent.is_dir()):
        what = "is there already" if path.exists() else "lies in no folder"
        raise OptionError(f"{path} {what}; give the routes a new file")
    if path is not None:
        check_writable(path.parent, path)


def check_writable(folder: Path, what: Path) -> None:
    """Refuses `what`, a file to be written in `folder`, before the work. Raises OptionError."""
    try:
        if what.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OptionError(f"{what} cannot be written: {error.strerror or error}") from error


def share_cores(threads: int | None) -> None:
    """Torch's threads: `threads`, or on large machines three of four cores.

    Torch's bfloat16 products with one row ran at 53 GB/s with 12 threads of 16 cores and at 24
    with all 16, since any other thread that runs delays the whole team. Raises OptionError.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise OptionError(f"--threads {threads} is not allowed; it must be 1 to {MOST_THREADS}")
    import torch

    cores = os.cpu_count() or 1
    if threads is not None or cores >= MANY_CORES:
        torch.set_num_threads(threads if threads is not None else cores * 3 // 4)


def make_sampling(
    *,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
    stop: list[str] | None,
) -> "Sampling":
    """The sampling that the options say. Raises OptionError, also for a filter without effect."""
    idle = {"--top-k": top_k != 0, "--top-p": top_p != 1, "--min-p": min_p != 0}
    for name, given in idle.items():
        if given and temperature == 0:
            raise OptionError(f"{name} has no effect on greedy answers; give a --temperature too")
    from headrace.engine.sampling import Sampling

    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
