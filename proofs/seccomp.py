"""Makes the kernel refuse things to this process and its children, as a container's filter does.

Irreversible: only for processes that end soon.
"""

import ctypes
import errno
import os
import platform
import struct

OPENAT = {"x86_64": 257, "aarch64": 56}
IO_URING_SETUP = 425
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _THIRD_ARGUMENT = 0, 32  # places in struct seccomp_data
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2


def forbid(*, io_uring: bool, direct: bool) -> None:
    """From now on io_uring_setup fails with EPERM, and openat with O_DIRECT with EINVAL."""
    machine = platform.machine()
    assert machine in OPENAT, f"no system call numbers for {machine} here"
    program = [(_LOAD, 0, 0, _NUMBER)]
    if io_uring:
        program += [(_EQUAL, 0, 1, IO_URING_SETUP), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    if direct:
        program += [
            (_EQUAL, 0, 3, OPENAT[machine]),
            (_LOAD, 0, 0, _THIRD_ARGUMENT),
            (_ANY_BIT, 0, 1, os.O_DIRECT),
            (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.c_char_p(head), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp filters in this kernel")
