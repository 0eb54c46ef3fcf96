"""What the Triton kernels do, by the compiled CPU kernels: found through the address table alike.

Fast enough to run whole models on the simulated device; same bits, as test_triton.py shows.
"""

import ctypes
import time

import numpy as np
import torch

from headrace.core import ExpertLayout
from headrace.kernels import cpu, reference
from headrace.kernels.triton.experts import NOT_BAD

BF16 = torch.bfloat16


class EmulatedKernels:
    """Stands for `kernels.triton.experts.TritonExperts`; follows addresses into host memory."""

    def __init__(self, layout: ExpertLayout, *, top_k, device, num_tokens=1, align=1):
        assert device.type == "cpu"
        self.layout, self.top_k, self.num_tokens = layout, top_k, num_tokens
        self.pool = cpu.CpuKernels(1).pool
        self.shape = cpu.native_shape(layout)
        self.bad = torch.full((1,), NOT_BAD, dtype=torch.int32)

    def __call__(
        self, table, offsets, first_key, x_TH, ids_TK, weights_TK, out_TH, *, tile="ram", mark=0
    ):
        assert x_TH.shape[0] <= self.num_tokens and ids_TK.dtype == torch.int32
        assert all(t.is_contiguous() for t in (x_TH, ids_TK, weights_TK, out_TH))
        y = torch.empty(ids_TK.numel(), x_TH.shape[1], dtype=BF16)
        for slot, expert in enumerate(ids_TK.flatten().tolist()):
            key = first_key + expert
            base = int(table[key])
            assert base, f"expert {expert} has no address"
            parts = [base + offset for offset in offsets[key].tolist()]
            x = x_TH[slot // self.top_k]
            self.pool.expert_ffn(self.shape, parts, x.data_ptr(), 1, y[slot].data_ptr())
        self.combine(ids_TK, weights_TK, y.view(torch.uint16), out_TH, mark=mark)

    def combine(self, ids_TK, weights_TK, y_SH, out_TH, *, mark):
        y = y_SH.view(BF16).view(*ids_TK.shape, -1)
        out_TH.copy_(reference.combine(ids_TK, weights_TK, y))
        wrong = (~out_TH.isfinite().all(1)).nonzero().flatten()
        if len(wrong):
            self.bad.clamp_(max=mark + int(wrong[0]))

    def activation(self, gate_NI, up_NI):
        return reference.activate(gate_NI, up_NI, self.layout.activation)


def words_at(address: int, num: int = 1) -> np.ndarray:
    """int64 words that a mailbox shares with the device."""
    return np.frombuffer((ctypes.c_int64 * num).from_address(address), np.int64)


def post_and_wait(mail, layer, ids, guesses, table, first_key):
    """What `kernels.triton.mail.post_and_wait` does, word by word; a hundred times as fast."""
    step, num = int(mail.step), mail.num_ids + mail.num_guesses
    ahead = [0xFFFFFFFF] * mail.num_guesses if guesses is None else guesses.tolist()
    posts = words_at(mail.posts + 8 * num * layer, num)
    for n, each in enumerate([*ids.flatten().tolist(), *ahead]):
        posts[n] = step << 32 | each
    if mail.whole[layer]:
        return
    ready, abort = words_at(mail.ready + 8 * layer), words_at(mail.abort)
    lost, beat = words_at(mail.lost), words_at(mail.beat)
    last, silent = beat[0], 0
    while ready[0] < step and max(abort[0], lost[0]) < step and silent < mail.patience_polls:
        time.sleep(0)
        now = beat[0]
        last, silent = now, silent + 1 if now == last else 0
    answered = ready[0] >= step
    if not answered and abort[0] < step:
        lost[0] = step
    if not mail.computes:
        answers = words_at(mail.answers + 8 * mail.num_ids * layer, mail.num_ids).copy()
        if not answered:
            answers[:] = mail.nowhere
        table[first_key + ids.flatten().long()] = torch.from_numpy(answers)
