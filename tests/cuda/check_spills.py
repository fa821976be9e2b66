#!/usr/bin/env python3
"""Checks that no kernel keeps registers in memory.

    check_spills.py NVCC SOURCE ROOT ARCHITECTURE[,ARCHITECTURE...] [NVCC FLAG...]

Compiles SOURCE for every architecture (80, 90, ...) with ptxas reporting, prints registers, stack and shared memory of each
kernel, and exits 1 where one spills, or has a stack at all: an array that the compiler could not keep in registers, which a
kernel that is bound by memory pays for in every loop. Standard library only.
"""

import concurrent.futures
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\w+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


class Kernel(NamedTuple):
    architecture: str
    name: str
    stack: int
    stores: int
    loads: int
    registers: int
    shared: int

    @property
    def clean(self) -> bool:
        return self.stack == self.stores == self.loads == 0


def parse(report: str) -> list[Kernel]:
    """Kernels of a ptxas -v report, in its order. Functions that a kernel calls count towards that kernel."""
    kernels: list[Kernel] = []
    architecture = name = ""
    frames: list[tuple[int, int, int]] = []
    for line in report.splitlines():
        if match := ENTRY.search(line):
            name, architecture = match[1], match[2]
            frames = []
        elif match := FRAME.search(line):
            frames.append((int(match[1]), int(match[2]), int(match[3])))
        elif (match := USED.search(line)) and name:
            stack, stores, loads = (max(frame[i] for frame in frames) for i in range(3))
            kernels.append(Kernel(architecture, name, stack, stores, loads, int(match[1]), int(match[2] or 0)))
            name = ""
    return kernels


def compile_for(nvcc: str, source: str, root: str, architecture: str, flags: list[str]) -> list[Kernel]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        command = [nvcc, "-cubin", f"-arch=sm_{architecture}", "-std=c++20", "-O3", "-Xptxas", "-v", f"-I{root}", *flags,
                   source, "-o", cubin.name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stdout}{run.stderr}")
    kernels = parse(run.stdout + run.stderr)
    if not kernels:
        sys.exit(f"ptxas reported no kernel of {source} for sm_{architecture}; its output:\n{run.stdout}{run.stderr}")
    return kernels


def demangled(names: list[str]) -> list[str]:
    try:
        run = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
        return [name.replace("engram::kernels::cuda::", "") for name in run.stdout.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        return names


def main() -> int:
    if len(sys.argv) < 5:
        print(__doc__, file=sys.stderr)
        return 2
    nvcc, source, root, architectures, *flags = sys.argv[1:]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda a: compile_for(nvcc, source, root, a, flags), architectures.split(","))
        kernels = [kernel for some in found for kernel in some]
    for kernel, name in zip(kernels, demangled([kernel.name for kernel in kernels])):
        print(f"{'ok  ' if kernel.clean else 'FAIL'} {kernel.architecture:7} {kernel.registers:4} registers "
              f"{kernel.shared:6} B shared {kernel.stack:4} B stack {kernel.stores:4} B stored {kernel.loads:4} B loaded  {name}")
    dirty = [kernel for kernel in kernels if not kernel.clean]
    if dirty:
        print(f"{len(dirty)} of {len(kernels)} kernels keep registers or arrays in memory")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
