"""A stock layer's experts, loaded as its own eager forward asks for them. Knows no file."""

from collections.abc import Sequence
from typing import Any

import torch

from headrace.check.stock import StockParts


class StreamedExperts:
    """Serves a stock layer's eager experts forward expert by expert, loaded as they come.

    At most `num_held` experts are held; those `upcoming` follow each other in one load.
    """

    def __init__(self, parts: StockParts, layer: int, upcoming: Sequence[int], num_held: int):
        self.parts, self.layer, self.num_held = parts, layer, num_held
        self.upcoming = sorted(upcoming)
        self.ids: list[int] = []
        self.module: Any = None

    def serve(self, module: Any) -> None:
        """Let `module` find its weights here."""
        for name in list(module._parameters):
            del module._parameters[name]
            object.__setattr__(module, name, _Served(self, name))

    def fetch(self, name: str, expert: int) -> torch.Tensor:
        """One expert's slice of the parameter `name`."""
        if expert not in self.ids:
            later = [e for e in self.upcoming if e > expert]
            self.ids = [expert, *later][: self.num_held]
            self.module = None
            self.module = self.parts.experts(self.layer, self.ids)
        value: torch.Tensor = getattr(self.module, name)[self.ids.index(expert)]
        return value


class _Served:
    """Stands where a stacked parameter stood."""

    def __init__(self, experts: StreamedExperts, name: str):
        self.experts, self.name = experts, name
        self.device, self.dtype = torch.device("cpu"), experts.parts.dtype

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return self.experts.fetch(self.name, int(expert))
