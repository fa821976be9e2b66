#include "server/transport/unary_call.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/observe/log.h"
#include "server/refusal/refusal.h"
#include "server/transport/wire_status.h"

namespace engram {

UnaryCall::UnaryCall(const char* method, grpc::CallbackServerContext& context, int64_t request_bytes, Metrics& metrics,
                     CallState& state)
    : method_(method),
      context_(context),
      request_bytes_(request_bytes),
      metrics_(metrics),
      state_(state),
      started_(absl::Now()),
      deadline_(absl::FromChrono(context.deadline())) {
  ++state_.in_flight;
  metrics_.CallStarted();
}

UnaryCall::~UnaryCall() { --state_.in_flight; }

void UnaryCall::End(const absl::Status& status, int64_t reply_bytes) {
  permit_.GiveBackTokens();
  const RefusalDetail detail = DetailOf(status);
  if (!detail.offenders.empty()) metrics_.Refused(ReasonName(detail.offenders.front().reason));
  if (absl::IsInternal(status)) {
    Log(LogLevel::kError, "call failed", {{"method", method_}, {"status", status.ToString()}});
  }
  AddPushback(status, context_);
  if (state_.draining.load(std::memory_order_relaxed)) context_.AddTrailingMetadata("engram-draining", "1");
  metrics_.CallEnded(method_, absl::StatusCodeToString(status.code()), absl::Now() - started_, request_bytes_,
                     status.ok() ? reply_bytes : 0);
  Finish(ToWireStatus(status));  // `this` may be gone from here on
}

}  // namespace engram
