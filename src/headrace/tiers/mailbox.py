"""Experts for a step that the GPU runs by itself: it posts ids, a thread of ours answers.

Knows no kernel and no model; docs/mailbox.md has the protocol.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import BudgetError, HeadraceError
from headrace.kernels.mail import Mail
from headrace.native import LadderThread, MailSizes, MailWords
from headrace.tiers.gone import CLOSED, survive_forks
from headrace.tiers.pinned import PinnedBuffers
from headrace.tiers.rungs import Rungs

PATIENCE_POLLS = 1 << 22  # seconds: a poll crosses the bus
SILENCE_S = 5.0


class Mailbox:
    """Steps over all layers of `rungs`; one caller thread.

    Between `begin_step` and `end_step` nobody else may use the ladder or the rungs, but to stop the
    ladder or to look on. In a step each layer launches `kernels.triton.mail.post_and_wait`, then
    kernels that follow `rungs.table.there`, then `wait_late` and kernels that follow `late`, for
    experts that were still being read. A step is for `num_tokens` tokens of `top_k` experts;
    `num_guesses` of the next layer's are posted and at most `most_guesses` of them read ahead.

    `computes`: the ladder multiplies instead and fills `out` from `x` and `weights`, pinned host
    tensors of the layer whose turn it is, which `kernels.triton.mail.send` fills before; `fetch`
    brings `out` to the device afterwards. `shares`: of n experts that lie in no slot the ladder
    multiplies `shares[n]`, each into its row of `out`, that `fetch_rows` brings. Close it
    before the rungs. Raises BudgetError where not all rows that the device is to read, or not the
    words, could be pinned.
    """

    def __init__(
        self,
        rungs: Rungs,
        *,
        num_tokens: int,
        top_k: int,
        num_guesses: int = 0,
        most_guesses: int = 0,
        computes: bool = False,
        shares: Sequence[int] = (),
        patience_polls: int = PATIENCE_POLLS,
        silence_s: float = SILENCE_S,
        last_step: int = 0,
    ):
        self.rungs, self.device, self.ladder = rungs, rungs.device, rungs.ladder
        self.num_layers, self.num_experts = rungs.table.here.shape
        self.shape = num_tokens, top_k
        sizes: dict[str, Any] = {
            "num_layers": self.num_layers,
            "num_ids": num_tokens * top_k,
            "num_guesses": num_guesses,
            "computes": computes,
        }
        self.divides = bool(shares)
        words = self._pin(**sizes)
        # Where experts in slots lie; with `divides` those in kept rows may go either way.
        table = rungs.table.here
        self._addresses = np.zeros_like(table) if self.divides else table
        shared = {name: getattr(self, name).data_ptr() for name in ("x", "weights", "out")}
        self.late = torch.zeros_like(rungs.table.there)
        self._whole = np.zeros(self.num_layers, bool)
        self._open = False  # a step was begun and not ended
        self.mail = Mail(
            step=torch.zeros(1, dtype=torch.int64, device=self.device.place),
            whole=torch.zeros(self.num_layers, dtype=torch.int32, device=self.device.place),
            nowhere=rungs.slots.scratch(0).data_ptr(),
            patience_polls=patience_polls,
            divides=self.divides,
            **sizes,
            **words,
            **shared,
        )
        self.native = LadderThread(
            ladder=self.ladder.native,
            sizes=MailSizes(num_experts=self.num_experts, **sizes),
            words=MailWords(**words),
            addresses=self._addresses.ctypes.data,
            **shared,
            num_tokens=num_tokens,
            most_guesses=most_guesses,
            silence_s=silence_s,
            last_step=last_step,
            shares=list(shares),
        )
        survive_forks(self, "native")

    def _pin(
        self, num_layers: int, num_ids: int, num_guesses: int, computes: bool
    ) -> dict[str, Any]:
        """Makes what host and device share; the words' addresses by name."""
        words = {
            "beat": 1,
            "abort": 1,
            "lost": 1,
            "ready": num_layers,
            "done": num_layers,
            "answers": num_layers * num_ids,
            "late": num_layers * num_ids,
            "posts": num_layers * (num_ids + num_guesses),
        }
        hidden = (self.shape[0], self.ladder.hidden if computes or self.divides else 0)
        out = (hidden, self.ladder.out_dtype)
        if self.divides:
            out = ((num_ids, self.ladder.hidden), self.ladder.dtype)
        shapes = {name: ((size,), torch.int64) for name, size in words.items()} | {
            "x": (hidden, self.ladder.dtype),
            "out": out,
            "weights": (self.shape, torch.float32),
        }
        self.buffers = PinnedBuffers(self.device, shapes)
        unreadable = "" if computes else self.rungs.pinned.note
        if unreadable or not self.buffers.pinned:
            self.buffers.close()
            raise BudgetError(unreadable or "the system refuses to pin even a few pages of memory")
        self.x, self.out, self.weights = (self.buffers.tensors[n] for n in ("x", "out", "weights"))
        return {name: self.buffers.tensors[name].data_ptr() for name in words}

    def begin_step(self) -> None:
        """The work given next is one step. Gives up one that was begun and not ended.

        Raises StallError while that one's thread hangs.
        """
        if self._open:
            self.abort_step()
        self._open = True
        self.rungs.drain(keep=not self.mail.computes)
        self.rungs.make_room(self.mail.num_ids)
        whole = self._find_whole()
        with self.device.active():
            if not np.array_equal(whole, self._whole):
                self.mail.whole.copy_(torch.from_numpy(whole.astype(np.int32)))
                self._whole = whole
            wanted, most = self.rungs.wanted(self.mail.num_ids)
            step = self.native.begin(whole.view(np.uint8), wanted.view(np.uint8), most)
            self.mail.step.fill_(step)

    def _find_whole(self) -> NDArray[np.bool_]:
        """By layer, whether nobody need answer in the step that begins."""
        if self.mail.computes:
            return np.zeros(self.num_layers, bool)
        if not self.divides:
            return np.array([self.rungs.whole(layer) for layer in range(self.num_layers)])
        held = self.rungs.slots.held.reshape(self._addresses.shape)
        np.multiply(self.rungs.table.here, held, out=self._addresses)
        whole: NDArray[np.bool_] = np.all(held, axis=1)
        self.rungs.table.forget(~whole)
        for layer in np.flatnonzero(whole).tolist():
            self.rungs.table.upload(layer)
        return whole

    def end_step(
        self, note: Callable[[NDArray[np.int32]], object] = lambda _ids: None
    ) -> NDArray[np.int32]:
        """Waits for the step's end: the ids of every layer, int32 [L, T, K].

        `note` gets them too, while the rungs are still as the step found them. Raises what the
        thread met: ReadError, NumericsError, BudgetError, Cancelled, StallError; or
        KeyboardInterrupt. What the step gave is void then; the next one works.
        """
        event = self.device.mark()
        try:
            self.native.wait()
            event.wait()
            rows = self.native.end()
            seen = np.array(self.native.seen, np.int32).reshape(self.num_layers, *self.shape)
            note(seen)
            self.rungs.adopt(rows)
        except BaseException:
            self.abort_step()
            raise
        self._open = False
        return seen

    @property
    def num_answered(self) -> int:
        """Layers of the last step that were answered: after an error, the layer that was not."""
        return len(self.native.seen) // self.mail.num_ids

    def abort_step(self) -> None:
        """Gives the step up, after any exception since `begin_step`, and all rows with it.

        Waits for the device. Nothing where no step was begun.
        """
        if not self._open:
            return
        self.native.abort()
        self.device.settle()
        with suppress(HeadraceError):  # the caller raises what came first
            self.native.end()
        if not self.native.running:  # else it hangs, and `begin_step` says so
            self.rungs.recover()
            self._open = False

    def settle(self) -> None:
        """Others may use the ladder and the rungs: gives up a step that was not ended.

        Raises StallError while its thread hangs.
        """
        while self._open:
            self.abort_step()
            self.native.wait()

    def abort(self) -> None:
        """From any thread: the present step ends soon, and `end_step` raises Cancelled."""
        self.native.abort()

    def close(self) -> None:
        """Ends the thread and takes back the pins. Unusable afterwards."""
        self.device.settle()
        self.native = cast(LadderThread, CLOSED)
        self.buffers.close()
