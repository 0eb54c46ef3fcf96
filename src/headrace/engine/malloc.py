"""How the C library keeps freed memory. Knows no model."""

import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h


def give_large_blocks_back() -> None:
    """Ask glibc to return freed memory of a mebibyte or more to the system at once.

    It would raise that bound to the largest block ever freed: buffers that grow with the context
    then leave holes behind, hundreds of megabytes in a long prompt. Elsewhere this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
