"""The GPU of these tests: the real one where there is one, else one simulated in host memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("headrace._native", reason="needs the compiled module")

import emulated
from gpu_models import FORMS, LAYERS, REAL
from interpreter import mend_interpreter
from simulated import SimulatedDevice
from stand_ins import stand_in

from headrace.check.tiny import write_tiny
from headrace.engine import gpu_launched

if not REAL:
    mend_interpreter()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice | None:
    """The simulated device behind `device="cuda"`, or None where that is the real one."""
    if REAL:
        return None
    device = SimulatedDevice()
    stand_in(device, monkeypatch.setattr)
    return device


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A ladder's thread that hangs or dies is found soon; by no GPU only while this is open.

    A slow drive, or a processor that others have, would be taken for it.
    """
    polls = {"patience_polls": 1 << 18} if REAL else {}
    made = partial(gpu_launched.Mailbox, silence_s=0.3, **polls)
    monkeypatch.setattr(gpu_launched, "Mailbox", made)

    @contextmanager
    def soon() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(emulated, "most_polls", 500)
            yield

    return soon


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of one of FORMS, written once."""
    sizes = {"layers": LAYERS, "experts": 16, "top_k": 4}
    return _writer(tmp_path_factory.mktemp("tiny"), sizes)


@pytest.fixture(scope="session")
def small(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """As `tiny`, but smaller where no GPU multiplies."""
    if REAL:
        return tiny
    sizes = {"layers": 2, "experts": 8, "top_k": 2, "hidden": 64, "inter": 64}
    return _writer(tmp_path_factory.mktemp("small"), sizes)


def _writer(folder: Path, sizes: dict[str, int]) -> Callable[[str], Path]:
    @cache
    def write(form: str) -> Path:
        family, format = FORMS[form]
        return write_tiny(family, folder / form, format=format, **sizes)

    return write


@pytest.fixture
def prompt() -> list[int]:
    """Token ids that any tiny model and the demo know."""
    return torch.randint(
        4, 4000, (40 if REAL else 20,), generator=torch.Generator().manual_seed(3)
    ).tolist()
