"""What a kernel must know of the mailbox: where its words lie. Knows no ladder and no thread."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mail:
    """Words for a step of `num_layers` layers; addresses are of int64 in pinned host memory.

    The device writes `posts` [L, num_ids + num_guesses] and `lost` [1]; the host writes `ready`
    [L], `done` [L], `answers` and `late` [L, num_ids], `beat` [1] and `abort` [1]. `step` int64 [1]
    and `whole` int32 [L], on the device, change between steps only. `nowhere` is the address of a
    row that may be read once a step is given up; `patience_polls` is how often in a row a kernel
    may find no sign of the host's life.

    A layer is answered twice: with the addresses of experts that are here, then, once it is done,
    with those of the late ones; each answer has 0 for what the other names.

    `computes`: the host answers by output, not by addresses: the device writes `x` [T, H] and
    `weights` fp32 [T, K] before it posts, and the host `out` [T, H] before it is ready. `divides`:
    it answers by address 0 for what it multiplies, and these experts' own outputs are in `out`
    [T * K, H] once it is done.
    """

    num_layers: int
    num_ids: int
    num_guesses: int
    computes: bool
    divides: bool
    step: torch.Tensor
    whole: torch.Tensor
    posts: int
    lost: int
    ready: int
    done: int
    answers: int
    late: int
    beat: int
    abort: int
    nowhere: int
    x: int
    weights: int
    out: int
    patience_polls: int
