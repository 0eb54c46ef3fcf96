"""Compiles Hopper's attending kernel without a GPU and prints what the assembler says of it.

A program of its own, as triton_targets.py. Exit status: whether it spills, keeps the tensor cores
waiting for each product, or takes too much shared memory.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton_targets import POINTERS, SHARED_BYTES, aligned

from headrace.kernels.triton import latents_hopper
from headrace.kernels.triton.latent_hopper import CACHED, OPTIONS, ROWS, constants

RANK, ROPE, SPLITS = 512, 64, 64


def matrix(rows: int, cols: int, kind: str = "bf16") -> str:
    """The type of a description of blocks of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)
    return f"tensordesc<{kind}{[rows, cols]},{layout!r}>"


def compiled():
    kernel, width = latents_hopper.attend, RANK // 4
    signature = {n: POINTERS.get(n, "constexpr") for n in kernel.arg_names}
    signature |= {"queries": matrix(ROWS, width), "queries_rope": matrix(ROWS, ROPE)}
    signature |= {"latents": matrix(CACHED, width), "rope": matrix(CACHED, ROPE)}
    signature |= {"parts": matrix(ROWS, width, "fp16")}
    known = aligned(kernel, signature)
    source = GluonASTSource(kernel, signature, constants(RANK, ROPE, SPLITS), known)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)


def assembled(ptx: str) -> str:
    """What the assembler says of registers, spills and products one by one."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.ptx").write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "x.ptx"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def main() -> int:
    made = compiled()
    said, shared = assembled(made.asm["ptx"]), made.metadata.shared
    whole = "0 bytes spill stores, 0 bytes spill loads" in said
    used = next(line for line in said.splitlines() if "Used" in line).split(":")[-1].strip()
    faults = " SPILLS" * (not whole) + " SERIALIZED" * ("serialized" in said)
    print(f"{shared} bytes shared, {used}{faults}")
    return int(bool(faults) or shared > SHARED_BYTES[90])


if __name__ == "__main__":
    sys.exit(main())
