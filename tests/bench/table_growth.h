// What a gathered row costs as the table grows.
#pragma once

namespace engram::kernels {

// Registers gather_growth/<pages>/<GiB> for each size that the environment variable ENGRAM_BENCH_TABLE_GIB lists
// ("1,2,4,8,16"), with huge pages and with pages of 4 KiB; nothing where it is not set. One table exists at a time; a
// size that free memory does not hold is skipped with an error.
void RegisterTableGrowth();

}  // namespace engram::kernels
