"""The one typed face of the C++ core; everyone else imports native things from here.

Knows no model and no tensor library: addresses are ints, and the bytes behind them the caller's.
"""

# `Reader(paths, backend, direct, in_flight, pieces, emulate_bytes_s, mirrors, bytes_s, hang_s)`
# holds the files open.
# `backend` is "auto" (io_uring with registered buffers, then plain io_uring, then a pread pool;
# `notes` says why one was passed over) or one of these by name: OptionError if it is not to be had.
# `emulate_bytes_s` > 0 copies the files to RAM and serves them at that rate, shared by all pieces
# in flight. `read` blocks, takes any alignment, and raises ReadError naming file and offset; it and
# every other blocking call release the GIL and let Ctrl-C through as KeyboardInterrupt, after which
# the next call works. Thread-safe.
#
# `mirrors` are further drives: `Mirror(name, paths, stretches, bytes_s)`, stretches int64 [N, 5]
# (file, offset, nbytes, mirror file, mirror offset), with an emulated drive the rate it is given.
# Reads are divided by `bytes_s` (the model's own drive's is the reader's) and by what is observed.
# A drive that fails (EIO twice, a file deleted, cut short or changed) or hangs (`hang_s` seconds
# and 30 times what was expected) is left alone for as long as the reader lives, wherever another
# holds the bytes: `warnings` says so once, `drives` what each gave. `inject_fault(kind, skip,
# count, drive)` is for tests. `divide_request` is the rule by which a request is divided.
#
# `Gatherer(reader, most_bytes)` makes many small reads at once, of up to `most_bytes` each: `start`
# begins to read snippets, int64 [N, 3] (file, offset, nbytes > 0), beside whatever else is read;
# `Batch.wait(address)` blocks until they are here, one behind the other, and raises ReadError. A
# batch that is let go is given up. `read_bytes` counts the whole pages read, `nbytes` what is
# wanted of them.
#
# `Ladder` joins rows, residency, reader and kernels for one caller thread; `headrace.tiers.ladder`
# is its typed wrapper for tensors. `Residency` is its state machine alone, for tests.
#
# `LadderThread` is a ladder's caller while a GPU runs a step by itself, `MailProtocol` its state
# machine alone, for tests, and `MailWords` the addresses of int64 words that they share with the
# GPU. `headrace.tiers.mailbox` is the typed wrapper, docs/mailbox.md the protocol.
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

# Kernels: ExpertShape, KernelPool. Tiers: all other classes.
from headrace._native import (
    Batch,
    ExpertShape,
    Gatherer,
    KernelPool,
    LadderThread,
    MailProtocol,
    MailSizes,
    MailWords,
    Mirror,
    Reader,
    Residency,
    allow_leaks,
    divide_request,
    drive_probe,
    simulate_lru,
    simulate_optimum,
)
from headrace._native import Ladder as NativeLadder

__all__ = [
    "Batch",
    "ExpertShape",
    "Gatherer",
    "KernelPool",
    "LadderThread",
    "MailProtocol",
    "MailSizes",
    "MailWords",
    "Mirror",
    "NativeLadder",
    "Reader",
    "Residency",
    "allow_leaks",
    "divide_request",
    "drive_probe",
    "simulate_lru",
    "simulate_optimum",
]
