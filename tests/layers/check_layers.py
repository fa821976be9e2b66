#!/usr/bin/env python3
"""Checks that the tree is the house that docs/design.md draws.

    check_layers.py [ROOT]

Reads every #include below kernels/, server/ and client/ and a few habits of all sources. Prints file:line, the rule and
what to do; exits 1 when anything was printed. Standard library only.
"""

import pathlib
import re
import subprocess
import sys
from typing import Iterator, NamedTuple


class Finding(NamedTuple):
    path: str
    line: int
    rule: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.advice}"


# Who may include whom; a layer always knows itself. transport -> admission -> session -> engine -> kernels, and less
# where a layer must know less than its place in the row would let it. Session and transport take the names of ids and
# dtypes from kernels; they compute nothing with them.
MAY_INCLUDE = {
    "kernels": set(),
    "refusal": set(),
    "observe": set(),
    "regions": {"refusal", "observe"},
    "model": {"kernels", "refusal", "observe"},
    "engine": {"model", "kernels", "refusal", "observe"},
    "session": {"kernels", "refusal", "observe"},
    "admission": {"refusal", "observe"},
    "transport": {"admission", "session", "engine", "regions", "model", "kernels", "refusal", "observe"},
    "client": set(),
    "bench": {"client", "recompute", "local"},
    "local": {"bench", "client", "model", "kernels", "engine"},
    "recompute": {"bench", "client", "model", "kernels", "engine"},
    "root": {"transport", "admission", "session", "engine", "regions", "model", "kernels", "refusal", "observe"},
}

WHY = {
    "kernels": "kernels work on plain memory and know nothing above them",
    "refusal": "refusal is a leaf: every layer may name a reason, it names no layer",
    "observe": "observe is a leaf: all may write to it, it reads nobody",
    "regions": "regions hand out bytes of shared memory; what stands in them is not their business",
    "model": "model turns a file into weights; who uses them is not its business",
    "engine": "the engine knows no sessions and no wire: a call brings its commit as a function",
    "session": "session keeps compressed ids and knows no tensors, queue or wire",
    "admission": "admission counts tokens and bytes and knows no engine, session or wire",
    "transport": "transport decodes, asks the core and encodes; it does not compute",
    "client": "the client library speaks only the wire contract",
    "bench": "engram-bench is a client of the wire; what it recomputes stands in client/bench/recompute, "
             "a table of its own in client/bench/local",
    "local": "it is a table in the bench's own process: the server's model and engine, without sessions and wire",
    "recompute": "it computes what a server should answer, without sessions, tickets, batches and wire: it checks those",
}

# The composition root builds every layer and hands each what it needs.
ROOT_FILE = re.compile(r"^server/(server|main|options\w*)\.(cc|h)$")
CODE = {".cc", ".h", ".cu", ".cuh"}
MAX_LINES = 600

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
CUDA_CONDITION = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*CUDA")
WIRE = re.compile(r"^(?:grpc|grpcpp|google/protobuf|google/rpc)/|\.pb\.h$")
WIRE_LAYERS = {"transport", "client", "bench", "root"}
# Files, flags, logging, metrics: what a kernel must not reach for.
FOREIGN_TO_KERNELS = re.compile(
    r"^(?:absl|CLI|prometheus|nlohmann|openssl)/|^(?:fstream|iostream|filesystem|cstdio|stdio\.h|fcntl\.h|sys/mman\.h|sys/stat\.h)$"
)
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|Users|root|work|workspace|builds)/[\w.-]+")


def layer_of(path: str) -> str | None:
    """The layer a repository path belongs to; None outside kernels/, server/ and client/."""
    parts = path.split("/")
    if parts[:2] == ["client", "bench"]:
        return parts[2] if parts[2] in ("recompute", "local") else "bench"
    if parts[0] in ("kernels", "client"):
        return parts[0]
    if parts[0] != "server":
        return None
    if len(parts) > 2:
        return parts[1]
    return "root" if ROOT_FILE.match(path) else "unplaced"


def source_files(root: pathlib.Path) -> list[str]:
    """Tracked and new files, none that git ignores; every file where there is no git checkout."""
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True, text=True, check=False,
    ) if (root / ".git").exists() else None
    if listing is not None and listing.returncode == 0:
        names = [name for name in listing.stdout.split("\0") if name]
    else:
        names = [str(p.relative_to(root)) for p in root.rglob("*")]
        names = [n for n in names if not n.startswith(("build/", ".git/", ".cache/")) and "__pycache__" not in n]
    return sorted({n for n in names if not n.startswith("tests/data/") and (root / n).is_file()})


def check_includes(path: str, lines: list[str], root: pathlib.Path) -> Iterator[Finding]:
    layer = layer_of(path)
    if layer is None:
        return
    if layer not in MAY_INCLUDE:
        yield Finding(path, 1, "placement", "directly below server/ stand only server, main and options*, else a known "
                      "layer's folder; move the file, or add the layer to MAY_INCLUDE in tests/layers/check_layers.py")
        return
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quoted, target = match[1] == '"', match[2]
        if quoted and (".." in target.split("/") or (root / path).parent.joinpath(target).is_file()):
            if not (root / target).is_file():
                yield Finding(path, number, "include-path", f'write "{target}" as a path from the repository root')
                continue
        other = layer_of(target)
        if other is not None and other != layer and other not in MAY_INCLUDE[layer]:
            allowed = ", ".join(sorted(MAY_INCLUDE[layer])) or "nothing else of ours"
            yield Finding(path, number, "layer", f"{layer} includes {target} of {other}, but may include: {allowed} "
                          f"({WHY[layer]}); pass a value or a function in instead")
        if WIRE.search(target) and layer not in WIRE_LAYERS:
            yield Finding(path, number, "wire", f"{layer} includes {target}; gRPC and protobuf stay in server/transport, "
                          "the composition root and client: decode there and pass plain values in")
        if layer == "kernels" and FOREIGN_TO_KERNELS.search(target):
            yield Finding(path, number, "kernel", f"kernels include {target}; they know plain memory only (no absl, files, "
                          "flags, logs, metrics): let the caller do it")


def check_habits(path: str, lines: list[str]) -> Iterator[Finding]:
    for number, line in enumerate(lines, 1):
        match = MACHINE_PATH.search(line)
        if match:
            yield Finding(path, number, "machine-path", f"{match[0]} exists on one machine only: take it from an argument "
                          "or from the file's own place")
    if len(lines) > MAX_LINES and path != "LICENSE":
        yield Finding(path, MAX_LINES + 1, "length", f"{len(lines)} lines; beyond {MAX_LINES} a file has two jobs: split it")


def check(root: pathlib.Path) -> list[Finding]:
    findings: list[Finding] = []
    cuda_conditions: dict[str, int] = {}
    for path in source_files(root):
        try:
            lines = (root / path).read_text(encoding="utf-8").splitlines()
        except (UnicodeDecodeError, FileNotFoundError):  # not text, or gone since it was listed
            continue
        findings += check_habits(path, lines)
        if pathlib.PurePath(path).suffix not in CODE:
            continue
        findings += check_includes(path, lines, root)
        if not path.startswith("kernels/cuda/"):
            for number, line in enumerate(lines, 1):
                if CUDA_CONDITION.match(line):
                    cuda_conditions.setdefault(path, number)
    # One factory chooses the backend; it may ask whether CUDA was built in.
    if len(cuda_conditions) > 1 or any(not path.startswith("server/engine/") for path in cuda_conditions):
        for path, number in cuda_conditions.items():
            findings.append(Finding(path, number, "cuda", "conditions on CUDA stand in kernels/cuda/ and in one factory "
                                    "in server/engine/ and nowhere else: ask the factory, or let CMake choose the file"))
    return findings


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    findings = check(root)
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings" if findings else "the layers hold")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
