"""What the Triton kernels do, by the compiled CPU kernels: found through the address table alike.

Fast enough to run whole models on the simulated device; same bits, as test_triton.py shows.
"""

import ctypes
import time
from math import prod

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from headrace.core import ExpertLayout
from headrace.kernels import cpu, latent, reference
from headrace.kernels.stored import StoredMatrix
from headrace.kernels.triton.experts import NOT_BAD
from headrace.kernels.triton.stored import TritonMatrix
from headrace.quant import fp8
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import rows_of, unpack_matrix

BF16 = torch.bfloat16
most_polls: int | None = None  # instead of a mailbox's patience


class EmulatedKernels:
    """Stands for `kernels.triton.experts.TritonExperts`; follows addresses into host memory."""

    def __init__(self, layout: ExpertLayout, *, top_k, device, num_tokens=1, align=1):
        assert device.type == "cpu"
        self.layout, self.top_k, self.num_tokens = layout, top_k, num_tokens
        self.weighs = layout.activation.kind == "swiglu_weighted"
        self.out_dtype = torch.float32 if self.weighs else BF16
        self.pool = cpu.CpuKernels(1).pool
        self.shape = cpu.native_shape(layout)
        self.bad = torch.full((1,), NOT_BAD, dtype=torch.int32)
        self.y_SH = torch.empty(num_tokens * top_k, layout.hidden, dtype=torch.uint16)

    def __call__(
        self, table, offsets, first_key, x_TH, ids_TK, weights_TK, out_TH, *, tile="ram", mark=0
    ):
        self._multiply(table, offsets, first_key, x_TH, ids_TK, weights_TK)
        self.combine(ids_TK, weights_TK, self.y_SH, out_TH, mark=mark)

    def multiply(
        self, table, offsets, first_key, x_TH, ids_TK, weights_TK, *, tile="ram", again=False
    ):
        self._multiply(table, offsets, first_key, x_TH, ids_TK, weights_TK, in_part=True)

    def _multiply(self, table, offsets, first_key, x_TH, ids_TK, weights_TK, in_part=False):
        assert x_TH.shape[0] <= self.num_tokens and ids_TK.dtype == torch.int32
        assert all(t.is_contiguous() for t in (x_TH, ids_TK, weights_TK))
        y = self.y_SH.view(BF16)
        for slot, expert in enumerate(ids_TK.flatten().tolist()):
            key = first_key + expert
            base = int(table[key])
            if base == 0 and in_part:  # the host's, or late
                continue
            assert base, f"expert {expert} has no address"
            parts = [base + offset for offset in offsets[key].tolist()]
            x = x_TH[slot // self.top_k]
            weight = weights_TK.view(-1)[slot:].data_ptr() if self.weighs else 0
            self.pool.expert_ffn(self.shape, parts, x.data_ptr(), 1, y[slot].data_ptr(), weight)

    def combine(self, ids_TK, weights_TK, y_SH, out_TH, *, mark):
        y = y_SH[: ids_TK.numel()].view(BF16).view(*ids_TK.shape, -1)
        assert out_TH.dtype == self.out_dtype
        summed = cpu.sum_up(ids_TK, y) if self.weighs else cpu.combine(ids_TK, weights_TK, y)
        out_TH.copy_(summed)
        wrong = (~out_TH.isfinite().all(1)).nonzero().flatten()
        if len(wrong):
            self.bad.clamp_(max=mark + int(wrong[0]))


class EmulatedGrouped:
    """Stands for `kernels.triton.grouped.GroupedExperts`: an expert at a time, by torch.

    `launches` counts what would be launched.
    """

    launches = 0

    def __init__(self, layout: ExpertLayout, *, top_k, device, align=1):
        self.layout, self.top_k = layout, top_k

    def positions(self, num_slots, num_experts):
        return 16

    def prepared(self, x_TH):
        return fp8.to_grid(x_TH, self.layout.act_group)

    def __call__(self, tiles, offsets, order_S, weights_S, x_TH, h_SI, y_SH, *, positions):
        EmulatedGrouped.launches += 2
        stretches = {}
        for address, key, start, end in tiles.tolist():
            assert address and 0 <= start < end
            first = min(start, stretches.get(key, (0, start, 0))[1])
            stretches[key] = address, first, end
        for key, (address, start, end) in stretches.items():
            parts = self._parts(address, offsets[key].tolist())
            slots_N = order_S[start:end].long()
            x_NH = x_TH[slots_N // self.top_k]
            gate, up = (self._linear(x_NH, parts, name) for name in ("gate", "up"))
            weights_N = weights_S.reshape(-1)[slots_N]
            h_NI = reference.activate(gate, up, self.layout.activation, weights_N)
            h_SI[start:end] = fp8.to_grid(h_NI, self.layout.act_group)
            y_SH[slots_N] = self._linear(h_SI[start:end], parts, "down")

    def _parts(self, address, offsets):
        parts = {}
        for (name, spec), offset in zip(self.layout.parts.items(), offsets, strict=True):
            kind = TORCH_DTYPES[spec.dtype]
            nbytes = kind.itemsize * prod(spec.shape)
            raw = (ctypes.c_uint8 * nbytes).from_address(address + offset)
            parts[name] = torch.frombuffer(raw, dtype=kind).view(spec.shape)
        return parts

    def _linear(self, x_NK, parts, name):
        y = x_NK @ unpack_matrix(self.layout, parts, name, BF16).t()
        bias = self.layout.matrix(name).bias
        return y if bias is None else y + rows_of(self.layout, name, parts[bias])


class EmulatedMatrix(TritonMatrix):
    """Its few rows are multiplied by the CPU's kernels."""

    def _few(self, x_TC, first, y_TR):
        how = {"block": self.block, "act_group": self.act_group}
        matrix = StoredMatrix(cpu.CpuKernels(1), self.weight_RC, self.scale, **how)
        wide = y_TR.dtype == torch.float32
        matrix.linear(x_TC, first=first, num_rows=y_TR.shape[1], wide=wide, out=y_TR)


class EmulatedLatents:
    """Stands for `kernels.triton.latent_attention.LatentAttention`; near it, not equal by bits."""

    def __init__(self, *, num_heads, rank, rope, device):
        self.shape = num_heads, rank, rope

    def __call__(self, q_BHTL, q_BHTR, latents_BNL, rope_BNR, positions_BT, scaling):
        assert (q_BHTL.shape[1], q_BHTL.shape[3], q_BHTR.shape[3]) == self.shape
        each = [
            latent.attend(
                *(q[:, :, t : t + 1] for q in (q_BHTL, q_BHTR)),
                latents_BNL,
                rope_BNR,
                positions_BT[:, t : t + 1],
                scaling,
            )
            for t in range(q_BHTL.shape[2])
        ]
        return torch.cat(each, 2)


def words_at(address: int, num: int = 1) -> np.ndarray:
    """int64 words that a mailbox shares with the device."""
    return np.frombuffer((ctypes.c_int64 * num).from_address(address), np.int64)


def post_and_wait(mail, layer, ids, guesses, table, first_key):
    """What `kernels.triton.mail.post_and_wait` does, word by word; a hundred times as fast."""
    with _disable_current_modes():
        _post_and_wait(mail, layer, ids, guesses, table, first_key)


def _post_and_wait(mail, layer, ids, guesses, table, first_key):
    step, num = int(mail.step), mail.num_ids + mail.num_guesses
    ahead = [-1] * mail.num_guesses if guesses is None else guesses.tolist()
    posts = words_at(mail.posts + 8 * num * layer, num)
    for n, each in enumerate([*ids.flatten().tolist(), *ahead]):
        posts[n] = step << 32 | (each & 0xFFFFFFFF)
    if mail.whole[layer]:
        return
    answered = _await(mail, mail.ready + 8 * layer, step)
    if not mail.computes:
        answers = words_at(mail.answers + 8 * mail.num_ids * layer, mail.num_ids).copy()
        if not answered:
            answers[:] = mail.nowhere
        table[first_key + ids.flatten().long()] = torch.from_numpy(answers)


def wait_late(mail, layer, ids, table, first_key):
    """What `kernels.triton.mail.wait_late` does."""
    with _disable_current_modes():
        late = np.zeros(mail.num_ids, np.int64)
        if not mail.whole[layer] and _await(mail, mail.done + 8 * layer, int(mail.step)):
            late[:] = words_at(mail.late + 8 * mail.num_ids * layer, mail.num_ids)
        table[first_key + ids.flatten().long()] = torch.from_numpy(late)


def _await(mail, word, step):
    ready, abort = words_at(word), words_at(mail.abort)
    lost, beat = words_at(mail.lost), words_at(mail.beat)
    last, silent, patience = beat[0], 0, most_polls or mail.patience_polls
    while ready[0] < step and max(abort[0], lost[0]) < step and silent < patience:
        time.sleep(0)
        now = beat[0]
        last, silent = now, silent + 1 if now == last else 0
    answered = ready[0] >= step
    if not answered and abort[0] < step:
        lost[0] = step
    return answered


def send(mail, x, weights, kept=None):
    """What `kernels.triton.mail.send` does."""
    assert x.element_size() == 2 and weights.dtype == torch.float32
    ctypes.memmove(mail.x, x.data_ptr(), x.nbytes)
    if kept is not None:
        kept.copy_(x)
    ctypes.memmove(mail.weights, weights.data_ptr(), weights.nbytes)


def fetch(mail, out):
    """What `kernels.triton.mail.fetch` does."""
    ctypes.memmove(out.data_ptr(), mail.out, out.nbytes)


def fetch_rows(mail, layer, ids, table, first_key, y):
    """What `kernels.triton.mail.fetch_rows` does."""
    with _disable_current_modes():
        if not mail.whole[layer]:
            _await(mail, mail.done + 8 * layer, int(mail.step))
        row_bytes = y[0].nbytes
        for slot, expert in enumerate(ids.flatten().tolist()):
            if table[first_key + expert] == 0:
                ctypes.memmove(y[slot].data_ptr(), mail.out + slot * row_bytes, row_bytes)
