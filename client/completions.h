// The threads on which the client's calls end.
//
// A completion queue of our own, not gRPC's callbacks: in gRPC 1.51 the threads behind those sleep for 100 ms after a
// second without work (a call that comes then was seen to take 50 ms instead of 0.7), and the process aborts when its
// last channel is let go of in a callback.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "grpcpp/completion_queue.h"

namespace engram::client {

class Completions {
 public:
  // Thread-safe. At most until the destructor.
  Completions();

  // Every operation started on queue() has completed, and no other is started. Not on one of the threads.
  ~Completions();

  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  grpc::CompletionQueue* queue() { return &queue_; }

  // What an operation on queue() is started with: `then` runs once, on one of the threads, with the operation's ok. It
  // must not block: there are two threads for all of a client's calls.
  static void* Tag(std::function<void(bool ok)> then);

 private:
  grpc::CompletionQueue queue_;
  std::vector<std::thread> threads_;
};

}  // namespace engram::client
