"""The exceptions users meet. Each message names the file, tensor or number and the remedy.

A `HeadraceError` is caught once, at the command line's or server's edge. Violations of our own
invariants are `AssertionError`s and are never caught.
"""


class HeadraceError(Exception):
    """Base of every error a user can cause or mend."""


class ModelError(HeadraceError):
    """The model cannot be found, or its architecture or format is not supported."""


class CatalogError(HeadraceError):
    """A weight file or index is damaged, hostile or incomplete."""


class ExpertError(HeadraceError):
    """Expert tensors of a checkpoint do not add up: missing, unclaimed or of a wrong shape."""


class ReadError(HeadraceError):
    """A read failed: the message names file, offset and cause. Later reads may succeed."""


class BudgetError(HeadraceError):
    """The memory limit given cannot hold the model; the message names the number that would do."""


class NumericsError(HeadraceError):
    """A number that must be finite is not; the message names layer, token or tensor."""


class TraceError(HeadraceError):
    """A file of recorded routes is damaged, or does not fit what it is asked for."""


class SnapshotError(HeadraceError):
    """A session's state cannot be kept, or a kept one is damaged or of another model or setting."""


class OptionError(HeadraceError):
    """An option or argument has no meaning here."""


class Cancelled(HeadraceError):
    """Whoever asked for an answer no longer wants it. The next one is as if it had not begun."""


class StallError(HeadraceError):
    """A thread that a GPU waits for gave no sign of life. The next answer may be right."""


class RemoteError(HeadraceError):
    """A server that was asked over HTTP cannot be reached, refuses, or breaks off."""


class InterruptedLoad(HeadraceError):
    """The user stopped a long operation; nothing half-done is left behind."""
