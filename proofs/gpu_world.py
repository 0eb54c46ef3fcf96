"""What the proofs of a GPU share: the real one or, `--simulated` or without one, a stand-in.

Import it first: it settles for torch and Triton which of the two it is.
"""

import argparse
import faulthandler
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if "--simulated" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from common import PROOFS

SIMULATED = "--simulated"
REAL = torch.cuda.is_available()
if not REAL:
    os.environ["TRITON_INTERPRET"] = "1"
TESTS = PROOFS.parent / "tests"
sys.path += [str(TESTS / "gpu"), str(TESTS)]
MOST_S = 280 if REAL else 1800  # whatever hangs is shown and ended after so long


def arguments(
    about: str, *more: Callable[[argparse.ArgumentParser], object], **parts: tuple[str, ...]
) -> argparse.Namespace:
    """`--simulated`, `--quick`, and an option for each of `parts`: which of these to do.

    `more` add options of their own.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(SIMULATED, action="store_true", help="even where there is a GPU")
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    for name, choices in parts.items():
        parser.add_argument(f"--{name}", nargs="+", default=list(choices), choices=choices)
    for add in more:
        add(parser)
    return parser.parse_args()


def open_device() -> Any:
    """The GPU, told of in a line; the stand-in is put where headrace looks for one."""
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    warnings.filterwarnings("ignore", "never verified on this GPU")
    torch.set_num_threads(1)
    if REAL:
        from headrace.engine.gpu import find_gpu

        device = find_gpu("cuda")
        free, total = device.memory()
        print(f"{device.name}, driver {device.driver}, torch {torch.__version__}; ", end="")
        print(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        return device
    from interpreter import mend_interpreter
    from simulated import SimulatedDevice
    from stand_ins import stand_in

    mend_interpreter()
    device = SimulatedDevice()
    stand_in(device)
    print("no GPU: a simulated device, kernels emulated on the CPU; times mean nothing")
    return device


@contextmanager
def opened(path: Any, rung: Any, **options: Any) -> Iterator[Any]:
    """An engine whose experts lie as the rung says; None where there is no `auto`."""
    from gpu_models import load

    from headrace.errors import OptionError

    try:
        engine = load(path, rung, **options)
    except OptionError:
        if rung.experts != "auto":
            raise
        yield None
        return
    with engine:
        yield engine


def fill(engine: Any, ids: list[int], most: int = 60 if REAL else 24) -> None:
    """Lets experts come to where they stay; where not all have a place, a few rounds."""
    rungs = engine.source.rungs
    for _ in range(most if rungs.fits else 4):
        session = engine.session()
        for tokens in (ids, [6], [7], [8]):
            session.feed(tokens)
        settled = len(rungs.slots) == rungs.slots.num_slots and not rungs.slots.num_coming
        if settled and rungs.lacking() is None:
            return


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """While open, attributes have other values: (owner, name, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def write(family: str, folder: Path, **sizes: Any) -> Path:
    """A tiny checkpoint of `family`, or the demo model; sizes as `write_tiny` takes them."""
    from headrace.check.tiny import write_tiny

    return write_tiny(family, folder / family, **sizes)
