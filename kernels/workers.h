// The threads a kernel may use: a fixed pool that runs one parallel loop at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace engram::kernels {

class Workers {
 public:
  // `threads` >= 1 in all, the calling thread included: Workers(1) starts none.
  explicit Workers(int threads);
  ~Workers();  // joins; no loop may be running

  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const;

  // Calls body(begin, end) for disjoint ranges that cover [0, items), each of at most `grain` items (>= 1), on the pool
  // and on the caller, and returns when all are done. What body writes is visible to the caller afterwards. Which
  // thread takes which range is not defined, so results must not depend on it. Not reentrant: one loop at a time, from
  // one thread at a time. Idle threads sleep.
  void ForEachRange(int64_t items, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace engram::kernels
