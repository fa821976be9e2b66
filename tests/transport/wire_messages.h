// Requests as bytes, in every way that protobuf allows to write them, and read by protobuf and by ArrivedMessage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engram/v1/engram.pb.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"

namespace engram {

// `bytes` in slices of the lengths given, over and over; 0 gives an empty slice.
grpc::ByteBuffer InSlices(const std::string& bytes, const std::vector<size_t>& lengths);

// A message of `type` with random fields: known ones in any order and more than once, packed and not, lengths and tags
// longer than needed, unknown fields of every wire type between, bytes that stand for nothing.
std::string RandomWire(const google::protobuf::Descriptor& type, std::mt19937& random, int depth = 0);

// Why ArrivedMessage and protobuf do not agree on these bytes; empty where they do: both find them malformed, or both
// get the same request (unknown fields left out, each highway where it belongs).
template <typename Request>
std::string Disagreement(const std::string& bytes, const std::vector<size_t>& slices);

extern template std::string Disagreement<v1::StreamRequest>(const std::string&, const std::vector<size_t>&);
extern template std::string Disagreement<v1::ApplyRequest>(const std::string&, const std::vector<size_t>&);
extern template std::string Disagreement<v1::LookupRequest>(const std::string&, const std::vector<size_t>&);

}  // namespace engram
