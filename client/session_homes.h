// Which replica took a session's calls: a call that relies on the session must go there again.
//
// Thread-safe. Knows the last kMost sessions or so; of others the answer is "anywhere", as for new ones.
#pragma once

#include <cstddef>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace engram::client {

class SessionHomes {
 public:
  // About 200 bytes each: some 13 MB.
  static constexpr size_t kMost = 65536;

  // Empty: not known.
  std::string Find(const std::string& session) const {
    absl::MutexLock lock(&mutex_);
    const auto found = homes_.find(session);
    return found == homes_.end() ? std::string() : found->second;
  }

  void Put(const std::string& session, const std::string& replica) {
    absl::MutexLock lock(&mutex_);
    if (homes_.size() >= kMost && !homes_.contains(session)) homes_.erase(homes_.begin());
    homes_[session] = replica;
  }

  void Forget(const std::string& session) {
    absl::MutexLock lock(&mutex_);
    homes_.erase(session);
  }

 private:
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::string> homes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace engram::client
