# Flags of our own code. engram_own(target) marks a target as ours: its warnings are errors.

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

find_package(Threads REQUIRED)

# The update is t = g*v rounded, then h + t rounded (docs/numerics.md): the compiler must not fuse them.
add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-ffp-contract=off>)

if(ENGRAM_SANITIZE)
  add_compile_options(-fsanitize=${ENGRAM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ENGRAM_SANITIZE})
endif()
if(ENGRAM_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# The root of the sources, also where kernels are built by a project of their own (kernels/cuda/check).
get_filename_component(ENGRAM_SOURCE_DIR ${CMAKE_CURRENT_LIST_DIR} DIRECTORY)

function(engram_own target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror>)
  target_include_directories(${target} PUBLIC ${ENGRAM_SOURCE_DIR})
endfunction()
