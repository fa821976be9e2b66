#!/usr/bin/env python3
"""Checks that clang-format would leave every tracked C++ file as it is; prints those it would not.

    check_format.py [--fix]
"""

import pathlib
import shutil
import subprocess
import sys

# Each major version formats a little differently.
MAJOR = 14
SUFFIXES = {".cc", ".h", ".cu", ".cuh"}
ROOT = pathlib.Path(__file__).resolve().parents[2]


def find_clang_format() -> str:
    for name in (f"clang-format-{MAJOR}", "clang-format"):
        path = shutil.which(name)
        if path and f"version {MAJOR}." in subprocess.run([path, "--version"], capture_output=True, text=True).stdout:
            return path
    sys.exit(f"clang-format {MAJOR} is not installed: scripts/install-packages test")


def tracked_files() -> list[str]:
    """Without git, as in an unpacked archive, every file is taken for tracked."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
        names = listing.stdout.split("\0")
    else:
        folders = ("kernels", "server", "client", "tests")
        names = [str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*")]
    return sorted(n for n in names if pathlib.PurePath(n).suffix in SUFFIXES and (ROOT / n).is_file())


def main() -> int:
    clang_format = find_clang_format()
    files = tracked_files()
    if "--fix" in sys.argv[1:]:
        return subprocess.run([clang_format, "-i", *files], cwd=ROOT, check=False).returncode
    # Complaints stand on stderr as "path:line:column: ...".
    done = subprocess.run([clang_format, "--dry-run", "-Werror", *files], cwd=ROOT, capture_output=True, text=True)
    complained = {line.split(":", 1)[0] for line in done.stderr.splitlines()}
    wrong = [name for name in files if name in complained]
    if done.returncode != 0 and not wrong:
        sys.exit(done.stderr)
    for name in wrong:
        print(name)
    if wrong:
        print(f"{len(wrong)} of {len(files)} files are not formatted: tests/layers/check_format.py --fix")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
