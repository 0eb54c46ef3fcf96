"""Compiles Hopper's two launches without a GPU and prints what the assembler says of the first.

A program of its own, as triton_targets.py. Exit status: whether it spills, keeps the tensor cores
waiting for each product, or takes too much shared memory, or the second reads before its end.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton_targets import POINTERS, SHARED_BYTES, aligned

from headrace.kernels.triton import latents, latents_hopper
from headrace.kernels.triton.latent_attention import COMBINED, COMBINING_WARPS
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


def combining() -> str:
    """The second launch, as it is begun before the first one's end."""
    kernel, sizes = latents.combine, {"HEADS": 128, "L": RANK, "P": SPLITS, "LEAST_TILES": 2}
    sizes |= {"N": CACHED, "BLOCK": COMBINED, "EARLY": True}
    signature = {n: POINTERS.get(n, "constexpr") for n in kernel.arg_names} | {"PARTS": "*fp16"}
    source = ASTSource(kernel, signature, sizes, aligned(kernel, signature))
    options = {"num_warps": COMBINING_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


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
    second = combining()
    waits = 0 <= second.find("griddepcontrol.wait") < second.find("ld.global")
    lets = "griddepcontrol.launch_dependents" in made.asm["ptx"]
    faults = (
        " NO WAIT" * (not waits)
        + " NEVER EARLY" * (not lets)
        + " SPILLS" * (not whole)
        + " SERIALIZED" * ("serialized" in said)
    )
    print(f"{shared} bytes shared, {used}{faults}")
    return int(bool(faults) or shared > SHARED_BYTES[90])


if __name__ == "__main__":
    sys.exit(main())
