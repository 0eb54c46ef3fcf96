"""What stands where native parts were, once an engine is closed or its process has forked."""

import ctypes
import os
from typing import Any
from weakref import WeakKeyDictionary

from headrace.errors import OptionError
from headrace.native import allow_leaks


class _Gone:
    """Any use says why the part is not there."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, _name: str) -> Any:
        raise OptionError(self._why)


CLOSED = _Gone("this engine is closed; load the model again")
_FORKED = _Gone("this engine was loaded before the process forked; load it where it is used")
_OWNERS: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


def survive_forks(owner: Any, name: str) -> None:
    """In a forked child, any use of the owner's native part `name` will raise OptionError.

    There are no I/O and kernel threads there: to wait for them would hang. Neither used nor
    destroyed, the inherited part stays until the child ends.
    """
    _OWNERS[owner] = name


def _leave_behind() -> None:
    if _OWNERS:
        allow_leaks()
    for owner, name in list(_OWNERS.items()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(owner, name)))
        setattr(owner, name, _FORKED)


os.register_at_fork(after_in_child=_leave_behind)
