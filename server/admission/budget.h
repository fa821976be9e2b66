// May this call come in? The queue's budget of tokens and bytes, and the permit that a call holds of it.
#pragma once

#include <cstdint>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"

namespace engram {

struct Cost {
  int64_t tokens = 0;  // summed over sequences, once per call
  int64_t bytes = 0;   // request and reply payload
};

struct BudgetOptions {
  int64_t max_tokens = 65536;            // admitted and not yet computed
  int64_t max_bytes = int64_t{1} << 30;  // admitted and not yet sent
};

class Budget;

// A call's share of the budget; dropping it anywhere gives everything back. Move-only; may outlive nothing of the
// Budget.
class Permit {
 public:
  Permit() = default;
  Permit(Permit&& other) noexcept;
  Permit& operator=(Permit&& other) noexcept;
  ~Permit();

  const Cost& cost() const { return cost_; }

  // The call is computed: its tokens no longer wait, while its bytes are still held by the reply on its way out.
  void GiveBackTokens();

 private:
  friend class Budget;
  Permit(Budget* budget, Cost cost) : budget_(budget), cost_(cost) {}

  Budget* budget_ = nullptr;
  Cost cost_;
};

// Thread-safe. Outlives its permits.
class Budget {
 public:
  explicit Budget(BudgetOptions options) : options_(options) {}

  // Refusals: TOO_MANY_TOKENS and MESSAGE_BYTES for a call that the empty queue could not hold, QUEUE_FULL for one that
  // it cannot hold now, DRAINING after Close().
  absl::StatusOr<Permit> Admit(const Cost& cost);

  // Nothing is admitted any more; permits out stay good.
  void Close();

  // What is out.
  Cost taken() const;

 private:
  friend class Permit;
  void GiveBack(const Cost& cost);

  const BudgetOptions options_;
  mutable std::mutex mutex_;  // as in SessionTable
  Cost taken_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace engram
