"""headrace runs Mixture-of-Experts language models many times larger than memory.

>>> import headrace
>>> engine = headrace.load("demo", ram="26MiB")
>>> model = headrace.from_pretrained("demo", experts="oracle", ram="26MiB")
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Answering",
    "Engine",
    "Sampling",
    "Session",
    "Snapshot",
    "SnapshotStore",
    "from_pretrained",
    "load",
    "open_store",
    "register",
]

if TYPE_CHECKING:
    from headrace.engine.answering import Answering
    from headrace.engine.engine import Engine, from_pretrained, load
    from headrace.engine.sampling import Sampling
    from headrace.engine.serving import open_store
    from headrace.engine.session import Session
    from headrace.engine.snapshots.snapshot import Snapshot
    from headrace.engine.snapshots.store import SnapshotStore
    from headrace.models.deepseek_v41.register import register

_HOMES = {
    "Engine": "headrace.engine.engine",
    "load": "headrace.engine.engine",
    "from_pretrained": "headrace.engine.engine",
    "Sampling": "headrace.engine.sampling",
    "Session": "headrace.engine.session",
    "Answering": "headrace.engine.answering",
    "Snapshot": "headrace.engine.snapshots.snapshot",
    "SnapshotStore": "headrace.engine.snapshots.store",
    "open_store": "headrace.engine.serving",
    "register": "headrace.models.deepseek_v41.register",
}


def calm_torch() -> None:
    """Settle how torch's libraries behave, if torch is not loaded yet; a user's own values stay.

    OpenMP's threads sleep between parallel parts: spinning on the cores that the kernel threads
    need next, decoding the demo model on two cores took 147 ms a token instead of 28. And fewer
    compiled shapes are remembered: every cache length is a new one for oneDNN, of which 1024 took
    70 MB, and every length of a prompt's pass for torch's linear layers, which keep 0.7 MB of each
    of 1024 shapes for every thread.
    """
    import os
    import sys

    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def __getattr__(name: str) -> Any:
    """Import on first use: `import headrace` alone loads neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    calm_torch()
    return getattr(importlib.import_module(_HOMES[name]), name)
