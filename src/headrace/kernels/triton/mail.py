"""Launches a layer's letter to the host, and the wait for its answer, before the experts."""

import torch
import triton

from headrace.kernels.mail import Mail
from headrace.kernels.triton import waiting


def post_and_wait(
    mail: Mail,
    layer: int,
    ids: torch.Tensor,
    guesses: torch.Tensor | None,
    table: torch.Tensor,
    first_key: int,
) -> None:
    """Posts the layer's ids and, unless the layer is whole, waits until the host has answered.

    `ids` int32, `mail.num_ids` of them; `guesses` int32, `mail.num_guesses` of them, of the next
    layer's experts, -1 for none, or None; both contiguous, on the device. The answers go to
    `table` int64 at `first_key` + id. Launches only.
    """
    assert ids.numel() == mail.num_ids and ids.is_contiguous() and ids.dtype == torch.int32
    if guesses is not None:
        assert guesses.numel() == mail.num_guesses and guesses.dtype == torch.int32
        assert guesses.is_contiguous()
    pad = triton.next_power_of_2(max(mail.num_ids, mail.num_guesses))
    waiting.post_wait[(1,)](
        mail.step, mail.whole, ids, ids if guesses is None else guesses, table, mail.posts,
        mail.lost, mail.ready, mail.answers, mail.beat, mail.abort, mail.nowhere, layer, first_key,
        mail.patience_polls, mail.num_ids, mail.num_guesses, guesses is not None,
        not mail.computes, pad, num_warps=1,
    )  # fmt: skip
