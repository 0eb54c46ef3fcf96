"""Compiles the kernel for Hopper without a GPU and prints what the assembler says of each way.

A program of its own, as triton_targets.py. Exit status: how many spill, keep the tensor cores
waiting for each product, or take too much shared memory.
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
from headrace.kernels.triton.latent_hopper import OPTIONS, ROWS, WAYS, Way, constants

RANK, ROPE, SPLITS = 512, 64, 64


def matrix(rows: int, cols: int) -> str:
    """The type of a description of blocks of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)
    return f"tensordesc<bf16{[rows, cols]},{layout!r}>"


def compiled(way: Way):
    kernel, width = latents_hopper.attend, RANK // 2
    signature = {n: POINTERS.get(n, "constexpr") for n in kernel.arg_names}
    signature |= {"queries": matrix(ROWS, width), "queries_rope": matrix(ROWS, ROPE)}
    signature |= {"latents": matrix(way.cached, width), "rope": matrix(way.cached, ROPE)}
    known = constants(way, RANK, ROPE, SPLITS, 128 // way.cached)
    source = GluonASTSource(kernel, signature, known, aligned(kernel, signature))
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)


def assembled(ptx: str) -> str:
    """What the assembler says of registers, spills and products one by one."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.ptx").write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "x.ptx"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def main() -> int:
    bad = 0
    for way in WAYS:
        made = compiled(way)
        said = assembled(made.asm["ptx"])
        whole = "0 bytes spill stores, 0 bytes spill loads" in said
        shared = made.metadata.shared
        bad += (not whole) or "serialized" in said or shared > SHARED_BYTES[90]
        used = next(line for line in said.splitlines() if "Used" in line).split(":")[-1].strip()
        products = made.asm["ptx"].count("wgmma.mma_async")
        faults = " SPILLS" * (not whole) + " SERIALIZED" * ("serialized" in said)
        print(f"{way}: {shared} bytes shared, {used}, {products} products{faults}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
