// What GetModel says.
#pragma once

#include <cstdint>
#include <string>

#include "engram/v1/engram.pb.h"
#include "server/model/engram_model.h"
#include "server/transport/step_call.h"

namespace engram {

// Who answers: the same for as long as the server runs.
struct ServerIdentity {
  uint64_t epoch = 0;  // random, never 0
  std::string backend;
  std::string isa;  // the instruction set it computes with
  std::string numerics_id;
  std::string residency;  // where tables are: "ram", "mmap", "device", "host"
};

v1::GetModelResponse DescribeModel(const EngramModel& model, const CallLimits& limits, const ServerIdentity& identity);

}  // namespace engram
