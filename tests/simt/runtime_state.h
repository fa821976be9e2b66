// What the parts of the runtime share.
#pragma once

#include <cstddef>

#include "tests/simt/runtime.h"

namespace simt {

// What a runtime function returns, and the thread's last error. A broken context answers everything with its error.
cudaError_t Return(cudaError_t error);

size_t DeviceBytes();  // in all: SIMT_DEVICE_BYTES

}  // namespace simt
