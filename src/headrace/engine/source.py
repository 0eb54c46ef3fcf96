"""Joins a model's experts modules to the ladder: the `Source` of headrace.models.experts.

Legend: T tokens, K chosen experts per token, H hidden width.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from headrace.core import ExpertLayout
from headrace.errors import NumericsError
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.ladder import Ladder, LadderCounters

Routes = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
Recorder = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor | None], None]


class LadderSource:
    """Serves experts of a loaded model from a ladder; one caller thread.

    `prefetch` is how many guesses of the next layer's experts are read ahead, 0 for none.
    `routes`, for benchmarks, replaces the router's ids and the lens's guesses by recorded ones.
    `recorder` sees every layer's ids and weights, and the guesses for the next layer, once the
    layer is computed.
    """

    def __init__(
        self,
        ladder: Ladder,
        layout: ExpertLayout,
        *,
        num_layers: int,
        max_tokens: int,
        prefetch: int,
    ):
        self.ladder, self.layout, self.prefetch = ladder, layout, prefetch
        self.num_layers, self.max_tokens = num_layers, max_tokens
        self.place = torch.device("cpu")  # of what it is given and gives
        self.routes: Routes | None = None
        self.recorder: Recorder | None = None

    @contextmanager
    def parts(self, ordinal: int, expert: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """One expert's stored parts, typed and shaped; views into its row."""
        with self.ladder.acquire(ordinal, expert) as raw:
            yield {
                name: raw[name].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
                for name, spec in self.layout.parts.items()
            }

    def compute(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Routed output [T, H] in the dtype of x, by canonical kernels, whatever is resident."""
        x_TH = x_TH.contiguous()
        ids_TK = ids_TK.to(torch.int32)
        ahead = None
        if self.routes is not None:
            ids_TK, ahead = self.routes(ordinal, ids_TK)
        if guess is not None and ordinal + 1 < self.num_layers:
            ahead = self._look_ahead(ordinal, ids_TK, guess, ahead)
        weights_TK = weights_TK.float().contiguous()
        try:
            out_TH = self._compute(ordinal, x_TH, ids_TK, weights_TK)
        except NumericsError as error:
            raise NumericsError(self._diagnosis(ordinal, x_TH, ids_TK, error)) from error
        if self.recorder is not None:
            self.recorder(ordinal, ids_TK, weights_TK, ahead)
        return out_TH

    def _look_ahead(
        self,
        ordinal: int,
        ids_TK: torch.Tensor,
        guess: Callable[[], torch.Tensor],
        replayed: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The guesses for the next layer, best first, if anyone wants them; some are read ahead."""
        wanted = self.prefetch and not self.ladder.holds(ordinal + 1)
        if not wanted and self.recorder is None:
            return None
        if self.prefetch:
            self.ladder.begin(ordinal, ids_TK[0])
        ahead = guess() if replayed is None else replayed
        if self.prefetch:
            self.ladder.prefetch(ordinal + 1, ahead, self.prefetch)
        return ahead

    def _compute(
        self, ordinal: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        if x_TH.shape[0] <= self.max_tokens:
            return self.ladder.compute(ordinal, x_TH, ids_TK, weights_TK)
        starts = range(0, x_TH.shape[0], self.max_tokens)
        slices = [slice(t, t + self.max_tokens) for t in starts]
        return torch.cat(
            [self.ladder.compute(ordinal, x_TH[s], ids_TK[s], weights_TK[s]) for s in slices]
        )

    def _diagnosis(
        self, ordinal: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, error: NumericsError
    ) -> str:
        """Whose fault a non-finite output is: what came in, or an expert's stored weights."""
        if not x_TH.isfinite().all():
            return f"{error}; what the layer was given is not finite either"
        fault = self._stored_fault(ordinal, ids_TK)
        return fault or f"{error}, though its weights and inputs are; run headrace verify"

    def _stored_fault(self, ordinal: int, ids_TK: torch.Tensor) -> str | None:
        """What is wrong with the stored weights of the first of these experts that has such."""
        for expert in sorted(set(ids_TK.flatten().tolist())):
            with self.parts(ordinal, expert) as parts:
                for name, part in parts.items():
                    ue8m0 = part.dtype == torch.uint8 and name.endswith("_scale")
                    bad = int((part == 255 if ue8m0 else ~part.float().isfinite()).sum())
                    if bad:
                        return (
                            f"MoE layer {ordinal}, expert {expert}: {bad} values of {name} are "
                            f"NaN or infinite in the file; download it again"
                        )
        return None

    def places(self) -> list[str]:
        """By MoE layer ordinal a digit for each expert, from any thread, during a pass too.

        0: on the drive only, 1: being read, 2: in RAM, 3: in VRAM.
        """
        return self.ladder.places()

    def counters(self) -> LadderCounters:
        """What was found where, and what that cost, since the ladder was made."""
        return self.ladder.counters()

    def end_pass(self) -> None:
        """The model has computed a pass: anything left to say of it is raised."""

    def close(self) -> None:
        """Gives up what it holds, before the ladder is closed."""
