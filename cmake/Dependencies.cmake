# Every dependency comes from the distribution's packages (scripts/install-packages); the floors are what Debian 12 and
# Ubuntu 24.04 ship. Nothing is downloaded by the build.

find_package(absl REQUIRED)  # Debian's config carries no version: kernels need nothing of it, the rest what 20220623 has
find_package(OpenSSL 3.0 REQUIRED COMPONENTS Crypto)
find_package(CLI11 2.1 CONFIG REQUIRED)
find_package(nlohmann_json 3.10 CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)  # its config carries no version; 1.0 has what is used

if(ENGRAM_BUILD_RPC)
  # Module mode first: gRPC's config looks for the protobuf:: targets, and Debian's protobuf ships no config of its own.
  find_package(Protobuf 3.21 REQUIRED)
  find_package(gRPC 1.51 CONFIG REQUIRED)
  find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)
endif()

if(ENGRAM_BUILD_TESTS)
  find_package(GTest 1.11 REQUIRED)
  find_package(benchmark 1.6 REQUIRED)
endif()
