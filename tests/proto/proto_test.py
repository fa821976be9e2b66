#!/usr/bin/env python3
"""proto/ against buf's rules, and against what was released: tests/proto/baseline.

buf comes from npm (scripts/install-node-tools, which scripts/test calls). Without it this test is skipped, with exit status
77 for ctest, unless ENGRAM_REQUIRE_BUF is set: scripts/test sets it.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASELINE = ROOT / "tests/proto/baseline/engram/v1/engram.proto"
PROTO = "engram/v1/engram.proto"
ADVICE = """
Numbers and names of what was released stay as they are: add beside it, or move the baseline where a break is meant
(CONTRIBUTING.md, "How to change the proto").
"""


def find_buf() -> str | None:
    installed = ROOT / "build/node-tools/node_modules/.bin/buf"
    return str(installed) if installed.exists() else shutil.which("buf")


BUF = find_buf()


def run_buf(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([BUF, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


class ProtoTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        # A module each, so that what is released and what is here share nothing but Google's files.
        self.released = pathlib.Path(folder.name) / "released"
        self.changed = pathlib.Path(folder.name) / "changed"
        for module in (self.released, self.changed):
            shutil.copytree(ROOT / "proto", module)
        shutil.copy(BASELINE, self.released / PROTO)

    def change(self, old: str, new: str) -> None:
        """Makes one change to what was released, as a later proto would."""
        text = BASELINE.read_text()
        self.assertEqual(text.count(old), 1, f"the baseline holds {text.count(old)} of {old!r}: change this test")
        (self.changed / PROTO).write_text(text.replace(old, new))

    def breaking(self, module: pathlib.Path) -> tuple[int, str]:
        return run_buf("breaking", str(module), "--against", str(self.released))

    def test_the_proto_is_clean(self) -> None:
        status, text = run_buf("lint", str(ROOT / "proto"))
        self.assertEqual((status, text), (0, ""))

    def test_nothing_released_is_broken(self) -> None:
        status, text = self.breaking(ROOT / "proto")
        self.assertEqual(status, 0, text + ADVICE)

    def test_a_field_that_changes_its_number_is_found(self) -> None:
        self.change("int64 start_pos = 2;", "int64 start_pos = 12;")
        status, text = self.breaking(self.changed)
        self.assertNotEqual(status, 0)
        self.assertIn('Previously present field "2" with name "start_pos" on message "Sequence" was deleted', text)

    def test_a_field_that_changes_its_type_is_found(self) -> None:
        self.change("repeated sfixed32 token_ids = 3;", "repeated int32 token_ids = 3;")
        status, text = self.breaking(self.changed)
        self.assertNotEqual(status, 0)
        self.assertIn('"token_ids" on message "Sequence" changed type from "sfixed32" to "int32"', text)

    def test_an_enum_value_that_changes_its_number_is_found(self) -> None:
        self.change("FORM_GATE = 6;", "FORM_GATE = 7;")
        status, text = self.breaking(self.changed)
        self.assertNotEqual(status, 0)
        self.assertIn('Previously present enum value "6" on enum "Form" was deleted', text)

    def test_an_rpc_that_goes_is_found(self) -> None:
        self.change("  rpc Lookup(LookupRequest) returns (LookupResponse);\n", "")
        status, text = self.breaking(self.changed)
        self.assertNotEqual(status, 0)
        self.assertIn('"Lookup"', text)

    def test_a_new_field_breaks_nothing(self) -> None:
        self.change("int64 start_pos = 2;", "int64 start_pos = 2;\n  // New.\n  int64 added = 15;")
        status, text = self.breaking(self.changed)
        self.assertEqual(status, 0, text)

    def test_a_field_without_a_word_is_found(self) -> None:
        self.change("int64 start_pos = 2;", "int64 start_pos = 2;\n  int64 added = 15;")
        status, text = run_buf("lint", str(self.changed))
        self.assertNotEqual(status, 0)
        self.assertIn('Field "added" should have a non-empty comment', text)


def main() -> None:
    if BUF is None:
        print("proto_test: buf is missing: scripts/install-packages node && scripts/install-node-tools", file=sys.stderr)
        sys.exit(1 if os.environ.get("ENGRAM_REQUIRE_BUF") else 77)
    unittest.main()


if __name__ == "__main__":
    main()
