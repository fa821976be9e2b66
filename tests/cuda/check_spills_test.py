#!/usr/bin/env python3
"""That check_spills.py sees what it is there for."""

import unittest

import check_spills

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5cleanv' for 'sm_90'
ptxas info    : Function properties for _Z5cleanv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 98 registers, used 1 barriers, 8192 bytes smem
ptxas info    : Compiling entry function '_Z5spillv' for 'sm_90'
ptxas info    : Function properties for _Z5spillv
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z5calls' for 'sm_80'
ptxas info    : Function properties for _Z5calls
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _Z6called
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""


class Parse(unittest.TestCase):
    def test_registers_and_shared_memory_of_a_clean_kernel(self) -> None:
        kernel = check_spills.parse(REPORT)[0]
        self.assertEqual(kernel, ("sm_90", "_Z5cleanv", 0, 0, 0, 98, 8192))
        self.assertTrue(kernel.clean)

    def test_spills_are_seen_without_a_stack_frame(self) -> None:
        kernel = check_spills.parse(REPORT)[1]
        self.assertEqual((kernel.stores, kernel.loads), (8, 12))
        self.assertFalse(kernel.clean)

    def test_the_stack_of_a_called_function_is_the_kernels(self) -> None:
        kernel = check_spills.parse(REPORT)[2]
        self.assertEqual((kernel.architecture, kernel.stack), ("sm_80", 16))
        self.assertFalse(kernel.clean)


if __name__ == "__main__":
    unittest.main()
