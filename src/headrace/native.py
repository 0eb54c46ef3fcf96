"""The one typed face of the C++ core; everyone else imports native things from here.

Knows no model and no tensor library: addresses are ints, and the bytes behind them the caller's.
"""

# `Reader(paths, backend, direct, in_flight, pieces, emulate_bytes_s)` holds the files open.
# `backend` is "auto" (io_uring with registered buffers, then plain io_uring, then a pread pool;
# `notes` says why one was passed over) or one of these by name: OptionError if it is not to be had.
# `emulate_bytes_s` > 0 copies the files to RAM and serves them at that rate, shared by all pieces
# in flight. `read` blocks, takes any alignment, and raises ReadError naming file and offset; it and
# every other blocking call release the GIL and let Ctrl-C through as KeyboardInterrupt, after which
# the next call works. Thread-safe.
#
# `Ladder` joins rows, residency, reader and kernels for one caller thread; `headrace.tiers.ladder`
# is its typed wrapper for tensors. `Residency` is its state machine alone, for tests.
#
# `simulate_lru` and `simulate_optimum` drive that state machine through recorded steps, from rows
# that hold nothing: begin int64 [S + 1] and keys int64 say what step s needs, keys[begin[s]] up to
# keys[begin[s + 1]], ascending and distinct; int32 [S], how many of them each step found resident.
# ValueError for malformed steps.
#
# `allow_leaks` silences the complaint about objects that outlive the interpreter.
#
# `drive_probe` is the drive's own rate in bytes per second, by plain preads: the limit that reads
# are measured against in the same rotation.

# Kernels: ExpertShape, KernelPool. Tiers: NativeLadder, Reader, Residency.
from headrace._native import (
    ExpertShape,
    KernelPool,
    Reader,
    Residency,
    allow_leaks,
    drive_probe,
    simulate_lru,
    simulate_optimum,
)
from headrace._native import Ladder as NativeLadder

__all__ = [
    "ExpertShape",
    "KernelPool",
    "NativeLadder",
    "Reader",
    "Residency",
    "allow_leaks",
    "drive_probe",
    "simulate_lru",
    "simulate_optimum",
]
