# Where CUDA's compiler is, and what our device code is built with. Sets ENGRAM_CUDA_FOUND; included at the top level, for
# a language is enabled where targets see it.

set(ENGRAM_CUDA AUTO CACHE STRING "Build libengram_cuda.so: AUTO (where the CUDA toolkit is found), ON (required) or OFF")
set_property(CACHE ENGRAM_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ENGRAM_CUDA_FOUND OFF)

# Sanitizers' builds test the host's code; nvcc knows none of their flags, and what it builds they cannot see into.
if(ENGRAM_CUDA STREQUAL "AUTO" AND (ENGRAM_SANITIZE OR ENGRAM_FUZZ))
  set(engram_cuda_wanted OFF)
else()
  set(engram_cuda_wanted ${ENGRAM_CUDA})
endif()

if(engram_cuda_wanted)
  # The toolkit's own installer puts nothing on PATH.
  find_program(ENGRAM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(ENGRAM_NVCC)
  if(ENGRAM_NVCC AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${ENGRAM_NVCC})
  endif()
  if(CMAKE_CUDA_COMPILER)
    # Set per target below; without a value CMake would ask the machine's device, which need not be there.
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80)
      set(engram_default_architectures ON)
    endif()
    if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
    endif()
    if(NOT CMAKE_CUDA_HOST_COMPILER)
      set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
    endif()
    enable_language(CUDA)
    # CMake before 3.26 does not know that nvcc has it since 12.0, and takes CMAKE_CXX_STANDARD for device code too.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    find_package(CUDAToolkit 12.0 QUIET)
    if(TARGET CUDA::cudart_static AND TARGET CUDA::cublasLt)
      set(ENGRAM_CUDA_FOUND ON)
    endif()
  endif()
  if(NOT ENGRAM_CUDA_FOUND AND NOT ENGRAM_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "ENGRAM_CUDA=${ENGRAM_CUDA}, but nvcc, libcudart_static.a or libcublasLt.so of CUDA 12.0 or later is "
                        "missing (nvcc: ${ENGRAM_NVCC}): put nvcc on PATH, or set CUDA_HOME or CMAKE_CUDA_COMPILER")
  endif()
endif()

if(ENGRAM_CUDA_FOUND)
  # Machine code for Ampere, Hopper and, where the compiler knows them, the Blackwells; PTX of the last for what comes.
  if(engram_default_architectures)
    set(ENGRAM_CUDA_ARCHITECTURES 80 90)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      list(APPEND ENGRAM_CUDA_ARCHITECTURES 100 120)
    endif()
  else()
    set(ENGRAM_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
  endif()
  list(JOIN ENGRAM_CUDA_ARCHITECTURES "," architectures_text)
  message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}: libengram_cuda.so for sm_${architectures_text}")
else()
  message(STATUS "CUDA: no libengram_cuda.so (ENGRAM_CUDA=${ENGRAM_CUDA})")
endif()

# Flags of every .cu of ours. Products and sums are fused where the source says so and nowhere else: the gate's update is
# two roundings (docs/numerics.md), as -ffp-contract=off says to the host's compiler.
set(ENGRAM_NVCC_FLAGS --fmad=false)

# engram_own_cuda(target): a target with .cu sources is ours, its warnings are errors.
function(engram_own_cuda target)
  set(real)
  set(last)
  foreach(architecture ${ENGRAM_CUDA_ARCHITECTURES})
    list(APPEND real ${architecture}-real)
    set(last ${architecture}-virtual)
  endforeach()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${real};${last}" CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:${ENGRAM_NVCC_FLAGS} --threads=2 --Werror=all-warnings
      -Xcompiler=-Wall,-Wextra,-Wshadow,-Wnon-virtual-dtor,-Werror>)
  target_include_directories(${target} PUBLIC ${ENGRAM_SOURCE_DIR})
endfunction()
