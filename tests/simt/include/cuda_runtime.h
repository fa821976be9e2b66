// Stands in for the CUDA toolkit's header of this name: device words and runtime, run by the executor.
#pragma once

#include "tests/simt/device.h"
#include "tests/simt/runtime.h"
