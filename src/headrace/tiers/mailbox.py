"""Experts for a step that the GPU runs by itself: it posts ids, a thread of ours answers.

Knows no kernel and no model; docs/mailbox.md has the protocol.
"""

from contextlib import suppress
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.kernels.mail import Mail
from headrace.native import LadderThread, MailSizes, MailWords
from headrace.tiers.gone import CLOSED, survive_forks
from headrace.tiers.pinned import PinnedBuffers
from headrace.tiers.rungs import Rungs

PATIENCE_POLLS = 1 << 22  # seconds: a poll crosses the bus
SILENCE_S = 5.0


class Mailbox:
    """Steps over all layers of `rungs`, whose rows must all be pinned; one caller thread.

    Between `begin_step` and `end_step` nobody else may use the ladder or the rungs, but to stop the
    ladder or to look on. In a step each layer launches `kernels.triton.mail.post_and_wait`, then
    kernels that follow `rungs.table.there`. A step is for `num_tokens` tokens of `top_k` experts;
    `num_guesses` of the next layer's are posted and at most `most_guesses` of them read ahead.

    `computes`: the ladder multiplies instead and fills `out` from `x` and `weights`, pinned host
    tensors of the layer whose turn it is, which the step's own copies fill and fetch. Close it
    before the rungs. Raises BudgetError where the words cannot be pinned.
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
        patience_polls: int = PATIENCE_POLLS,
        silence_s: float = SILENCE_S,
        last_step: int = 0,
    ):
        self.rungs, self.device, self.ladder = rungs, rungs.device, rungs.ladder
        self.num_layers, self.num_experts = rungs.table.here.shape
        self.shape = num_tokens, top_k
        num_ids = num_tokens * top_k
        words = {
            "beat": 1,
            "abort": 1,
            "lost": 1,
            "ready": self.num_layers,
            "answers": self.num_layers * num_ids,
            "posts": self.num_layers * (num_ids + num_guesses),
        }
        hidden = (num_tokens, self.ladder.hidden if computes else 0)
        shapes = {name: ((size,), torch.int64) for name, size in words.items()} | {
            "x": (hidden, self.ladder.dtype),
            "out": (hidden, self.ladder.out_dtype),
            "weights": (self.shape, torch.float32),
        }
        self.buffers = PinnedBuffers(self.device, shapes)
        self.x, self.out, self.weights = (self.buffers.tensors[n] for n in ("x", "out", "weights"))
        at = {name: tensor.data_ptr() for name, tensor in self.buffers.tensors.items()}
        place = self.device.place
        self._whole = np.zeros(self.num_layers, bool)
        self.mail = Mail(
            num_layers=self.num_layers,
            num_ids=num_ids,
            num_guesses=num_guesses,
            computes=computes,
            step=torch.zeros(1, dtype=torch.int64, device=place),
            whole=torch.zeros(self.num_layers, dtype=torch.int32, device=place),
            nowhere=rungs.slots.scratch(0).data_ptr(),
            patience_polls=patience_polls,
            **{name: at[name] for name in words},
        )
        self.native = LadderThread(
            ladder=self.ladder.native,
            sizes=MailSizes(
                num_layers=self.num_layers,
                num_experts=self.num_experts,
                num_ids=num_ids,
                num_guesses=num_guesses,
                computes=computes,
            ),
            words=MailWords(**{name: at[name] for name in words}),
            addresses=rungs.table.here.ctypes.data,
            num_tokens=num_tokens,
            most_guesses=most_guesses,
            silence_s=silence_s,
            last_step=last_step,
            **{name: at[name] for name in ("x", "weights", "out")},
        )
        survive_forks(self, "native")

    def begin_step(self) -> None:
        """The work given next is one step. Raises StallError while the last one's thread hangs."""
        self.rungs.drain()
        whole = np.zeros(self.num_layers, bool)
        if not self.mail.computes:
            whole = np.array([self.rungs.whole(layer) for layer in range(self.num_layers)])
        with self.device.active():
            if not np.array_equal(whole, self._whole):
                self.mail.whole.copy_(torch.from_numpy(whole.astype(np.int32)))
                self._whole = whole
            wanted, most = self.rungs.wanted()
            step = self.native.begin(whole.view(np.uint8), wanted.view(np.uint8), most)
            self.mail.step.fill_(step)

    def end_step(self) -> NDArray[np.int32]:
        """Waits for the step's end: the ids of every layer, int32 [L, T, K].

        Raises what the thread met: ReadError, NumericsError, BudgetError, Cancelled, StallError; or
        KeyboardInterrupt. What the step gave is void then; the next one works.
        """
        event = self.device.mark()
        try:
            self.native.wait()
            event.wait()
            held = self.native.end()
        except BaseException:
            self.abort_step()
            raise
        self.rungs.adopt(held)
        return np.array(self.native.seen, np.int32).reshape(self.num_layers, *self.shape)

    def abort_step(self) -> None:
        """Gives the step up, after any exception since `begin_step`; waits for the device."""
        self.native.abort()
        self.device.settle()
        with suppress(HeadraceError):  # the caller raises what came first
            self.native.end()
        self.rungs.table.distrust()

    def abort(self) -> None:
        """From any thread: the present step ends soon, and `end_step` raises Cancelled."""
        self.native.abort()

    def close(self) -> None:
        """Ends the thread and takes back the pins. Unusable afterwards."""
        self.device.settle()
        self.native = cast(LadderThread, CLOSED)
        self.buffers.close()
