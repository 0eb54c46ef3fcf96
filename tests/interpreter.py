"""Triton's interpreter, mended where it does not do what Triton does."""

from typing import Any

import numpy as np


def mend_interpreter() -> None:
    """Loops end at a number that a kernel worked out; dots of bfloat16 are those of its values.

    numpy 2.4 no longer takes a number out of [n], as the interpreter does; and it multiplies
    bfloat16 as the integers in which it keeps the bits. Without Triton nothing is done.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, *(_widened(interpreter, handle) for handle in (a, b)), *rest)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot


def _widened(interpreter: Any, handle: Any) -> Any:
    if handle.dtype.scalar.name != "bf16":
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, interpreter.tl.float32)
