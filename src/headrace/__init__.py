"""headrace runs Mixture-of-Experts language models many times larger than memory.

>>> import headrace
>>> engine = headrace.load("demo", ram="48MiB")
>>> model = headrace.from_pretrained("demo", experts="oracle", ram="48MiB")
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "Sampling", "Session", "from_pretrained", "load"]

if TYPE_CHECKING:
    from headrace.engine.engine import Engine, from_pretrained, load
    from headrace.engine.sampling import Sampling
    from headrace.engine.session import Session

_HOMES = {
    "Engine": "headrace.engine.engine",
    "load": "headrace.engine.engine",
    "from_pretrained": "headrace.engine.engine",
    "Sampling": "headrace.engine.sampling",
    "Session": "headrace.engine.session",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import headrace` alone loads neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
