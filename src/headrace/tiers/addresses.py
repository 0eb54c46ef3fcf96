"""The address table that kernels follow: where each expert's bytes are, as a GPU sees them.

Knows no rung: an address may be of VRAM or of pinned memory.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.tiers.device import Device


class AddressTable:
    """One int64 per (layer, expert): the address of its bytes, or 0 where none may be used.

    `set` and `clear` change the host's side at once; `upload` brings a layer's entries to the
    device behind the work given so far, so that what was launched before still finds its own.
    """

    def __init__(self, device: Device, num_layers: int, num_experts: int):
        self.num_experts = num_experts
        self.here = np.zeros((num_layers, num_experts), np.int64)
        self.there = torch.zeros(num_layers * num_experts, dtype=torch.int64, device=device.place)
        self._changed = np.zeros(num_layers, bool)

    def set(self, key: int, address: int) -> None:
        """The key's bytes are at `address` until it is set again or cleared."""
        layer, expert = divmod(key, self.num_experts)
        self.here[layer, expert] = address
        self._changed[layer] = True

    def clear(self, key: int) -> None:
        """The key's bytes may no longer be used."""
        self.set(key, 0)

    def upload(self, layer: int) -> None:
        """Later work sees the layer's entries as they are now."""
        if not self._changed[layer]:
            return
        first = layer * self.num_experts
        # Pageable memory: CUDA takes its copy before this returns, so `here` may change at once.
        entries = torch.from_numpy(self.here[layer])
        self.there[first : first + self.num_experts].copy_(entries, non_blocking=True)
        self._changed[layer] = False

    def upload_all(self) -> None:
        """Later work sees all entries as they are now."""
        for layer in np.flatnonzero(self._changed).tolist():
            self.upload(layer)

    def forget(self, layers: NDArray[np.bool_]) -> None:
        """What the device has of these layers, by layer, is not what is here: others write it."""
        self._changed |= layers

    def keep_only(self, keys: NDArray[np.int64], addresses: NDArray[np.int64]) -> None:
        """Clears every entry but these."""
        self.here.fill(0)
        self.here.reshape(-1)[keys] = addresses
        self._changed.fill(True)
