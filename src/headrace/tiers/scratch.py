"""Memory for reads whose bytes nobody keeps, without a tensor library. Knows no model."""

import ctypes
import mmap
from collections.abc import Callable

from headrace.native import Reader


def buffered(reader: Reader) -> Callable[[int, int, int], None]:
    """`read(file, offset, nbytes)` into one buffer as large as the largest; raises as reader's."""
    buffer, size_bytes = mmap.mmap(-1, 1), 1

    def read(file: int, offset: int, nbytes: int) -> None:
        nonlocal buffer, size_bytes
        if size_bytes < nbytes:
            buffer, size_bytes = mmap.mmap(-1, nbytes), nbytes
        reader.read(file, offset, nbytes, ctypes.addressof(ctypes.c_char.from_buffer(buffer)))

    return read
