// The one translation unit of the kernels: their source stands in the .cuh files, which tests/simt compiles too.
#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/gather.cuh"
#include "kernels/cuda/project.cuh"
