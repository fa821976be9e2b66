// absl::Status to grpc::Status: a refusal's reason and offenders become google.rpc details.
#pragma once

#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "google/rpc/status.pb.h"

namespace engram {

// How long a client should wait before it repeats a call that WorthRetry() refused: about one large batch.
inline constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);

// Details: ErrorInfo (domain "engram", metadata field, index, value, bound of the first offender and `offenders`, their
// number), BadRequest with one violation per offender, RetryInfo where a retry may pass. The details stay below
// kMaxDetailBytes, since a client's default limit for all trailers is 8 KiB; ErrorInfo's `offenders` tells of more.
inline constexpr size_t kMaxDetailBytes = 5000;
grpc::Status ToWireStatus(const absl::Status& status);

// The same as a message: code, message, details.
google::rpc::Status ToStatusMessage(const absl::Status& status);

// Adds `grpc-retry-pushback-ms` where the refusal says something about a retry.
void AddPushback(const absl::Status& status, grpc::ServerContextBase& context);

}  // namespace engram
