#include "server/admission/budget.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/refusal/refusal.h"

namespace engram {

Permit::Permit(Permit&& other) noexcept : budget_(std::exchange(other.budget_, nullptr)), cost_(other.cost_) {}

Permit& Permit::operator=(Permit&& other) noexcept {
  std::swap(budget_, other.budget_);
  std::swap(cost_, other.cost_);
  return *this;
}

Permit::~Permit() {
  if (budget_ != nullptr) budget_->GiveBack(cost_);
}

void Permit::GiveBackTokens() {
  if (budget_ != nullptr) budget_->GiveBack({.tokens = std::exchange(cost_.tokens, 0), .bytes = 0});
}

absl::StatusOr<Permit> Budget::Admit(const Cost& cost) {
  if (cost.tokens > options_.max_tokens) {
    return Refuse({Reason::kTooManyTokens, "sequences", absl::StrCat(cost.tokens),
                   absl::StrCat("<= ", options_.max_tokens),
                   absl::StrCat("a call of ", cost.tokens, " tokens never fits a queue of ", options_.max_tokens,
                                ": send it in pieces")});
  }
  if (cost.bytes > options_.max_bytes) {
    return Refuse({Reason::kMessageBytes, "layers", absl::StrCat(cost.bytes), absl::StrCat("<= ", options_.max_bytes),
                   absl::StrCat("a call of ", cost.bytes, " bytes never fits a queue of ", options_.max_bytes,
                                " bytes: send it in pieces")});
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return RefuseDraining();
  // Written as differences: taken and max are both below 2^62, their sum with a hostile cost need not be.
  if (cost.tokens > options_.max_tokens - taken_.tokens) {
    return Refuse({Reason::kQueueFull, "sequences", absl::StrCat(cost.tokens),
                   absl::StrCat("<= ", options_.max_tokens - taken_.tokens),
                   absl::StrCat("the queue holds ", taken_.tokens, " of ", options_.max_tokens, " tokens, ",
                                cost.tokens, " more do not fit")});
  }
  if (cost.bytes > options_.max_bytes - taken_.bytes) {
    return Refuse({Reason::kQueueFull, "layers", absl::StrCat(cost.bytes),
                   absl::StrCat("<= ", options_.max_bytes - taken_.bytes),
                   absl::StrCat("the queue holds ", taken_.bytes, " of ", options_.max_bytes, " bytes, ", cost.bytes,
                                " more do not fit")});
  }
  taken_.tokens += cost.tokens;
  taken_.bytes += cost.bytes;
  return Permit(this, cost);
}

void Budget::GiveBack(const Cost& cost) {
  const std::lock_guard<std::mutex> lock(mutex_);
  taken_.tokens -= cost.tokens;
  taken_.bytes -= cost.bytes;
}

void Budget::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
}

Cost Budget::taken() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return taken_;
}

}  // namespace engram
