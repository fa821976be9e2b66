#include "client/completions.h"

#include <memory>
#include <utility>

namespace engram::client {
namespace {

using Then = std::function<void(bool ok)>;

// One hands a reply over while the other reads the next one from its connection.
constexpr int kThreads = 2;

}  // namespace

Completions::Completions() {
  for (int i = 0; i < kThreads; ++i) {
    threads_.emplace_back([this] {
      void* tag = nullptr;
      bool ok = false;
      while (queue_.Next(&tag, &ok)) {
        const std::unique_ptr<Then> then(static_cast<Then*>(tag));
        (*then)(ok);
      }
    });
  }
}

Completions::~Completions() {
  queue_.Shutdown();
  for (std::thread& thread : threads_) thread.join();
}

void* Completions::Tag(Then then) { return new Then(std::move(then)); }

}  // namespace engram::client
