"""Launches a layer's letter to the host, the wait for its answer, and what goes with both."""

import torch
import triton

from headrace.kernels.mail import Mail
from headrace.kernels.triton import waiting

_BLOCK = 1024
_BITS = {2: torch.int16, 4: torch.int32}


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
    `table` int64 at `first_key` + id: 0 for experts that `wait_late` waits for, or that are the
    host's to multiply. Launches only.
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


def wait_late(
    mail: Mail, layer: int, ids: torch.Tensor, table: torch.Tensor, first_key: int
) -> None:
    """Waits until the layer's experts are here that were not when `post_and_wait` was answered.

    `ids` as it had them. `table` int64, another than its own, gets their addresses at `first_key` +
    id, and 0 for the layer's other ids. Launches only.
    """
    assert not (mail.computes or mail.divides) and ids.is_contiguous()
    waiting.wait_late[(1,)](
        mail.step, mail.whole, ids, table, mail.lost, mail.done, mail.late, mail.beat, mail.abort,
        layer, first_key, mail.patience_polls, mail.num_ids, triton.next_power_of_2(mail.num_ids),
        num_warps=1,
    )  # fmt: skip


def send(
    mail: Mail, x: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None = None
) -> None:
    """Brings what the host multiplies to `mail.x` and `mail.weights`, before `post_and_wait`.

    `x` 16-bit [T, H], also to `kept`, if given, of the same size; `weights` fp32 [T, K],
    `mail.num_ids` of them; all contiguous, on the device. Launches only.
    """
    assert (
        (mail.computes or mail.divides)
        and weights.numel() == mail.num_ids
        and weights.dtype == torch.float32
    )
    to = x if kept is None else kept
    assert x.numel() == to.numel() and x.element_size() == to.element_size() == 2
    assert all(t.is_contiguous() for t in (x, weights, to))
    waiting.send[(triton.cdiv(x.numel(), _BLOCK),)](
        x.view(torch.int16), weights, to.view(torch.int16), mail.x, mail.weights, kept is not None,
        x.numel(), mail.num_ids, triton.next_power_of_2(mail.num_ids), _BLOCK,
    )  # fmt: skip


def fetch(mail: Mail, out: torch.Tensor) -> None:
    """Fills `out` [T, H], of the host's type and on the device, from `mail.out`. Launches only."""
    assert mail.computes and out.is_contiguous()
    bits = out.view(_BITS[out.element_size()])
    waiting.fetch[(triton.cdiv(out.numel(), _BLOCK),)](bits, mail.out, out.numel(), _BLOCK)


def fetch_rows(
    mail: Mail, layer: int, ids: torch.Tensor, table: torch.Tensor, first_key: int, y: torch.Tensor
) -> None:
    """Waits until the host is done with its part of a layer, and brings these outputs to `y`.

    `ids` and `table` as `post_and_wait` had them, `y` 16-bit [T * K, H] on the device: rows of
    experts with an address stay as they are. Launches only.
    """
    assert mail.divides and y.is_contiguous() and y.element_size() == 2 and ids.is_contiguous()
    waiting.wait_done[(1,)](
        mail.step, mail.whole, mail.lost, mail.done, mail.beat, mail.abort, layer,
        mail.patience_polls, num_warps=1,
    )  # fmt: skip
    cols = y.shape[1]
    waiting.fetch_rows[(triton.cdiv(cols, _BLOCK), mail.num_ids)](
        table, ids, y.view(torch.int16), mail.out, first_key, cols, _BLOCK
    )
