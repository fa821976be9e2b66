#!/usr/bin/env python3
"""Checks that a shared library exports exactly the symbols named: check_exports.py NM LIBRARY SYMBOL..."""

import subprocess
import sys


def main() -> int:
    if len(sys.argv) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    nm, library, *wanted = sys.argv[1:]
    listing = subprocess.run([nm, "-D", "--defined-only", "-P", library], capture_output=True, text=True, check=True)
    exported = {line.split()[0].split("@")[0] for line in listing.stdout.splitlines() if line.strip()}
    for name in sorted(exported - set(wanted)):
        print(f"{library}: exports {name}, which nobody is to see")
    for name in sorted(set(wanted) - exported):
        print(f"{library}: does not export {name}")
    return 1 if exported != set(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
