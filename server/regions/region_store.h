// Which regions there are, whose they are, and how much memory they take.
//
// A region begins as a grant: a one-time token and the region's id, both for the principal that asked. Whoever presents
// the token in time claims it; the memory is made then, so grants that nobody claims cost none. From then on the
// principal's calls find it by its id, until its connection ends and it is dropped. Calls under way keep it: a
// shared_ptr pins the mapping.
//
// Tokens and ids are 256 and 128 bits of the system's randomness, looked up by hash: bytes are compared only where all
// 64 bits of a hash agree, so how long a look-up takes tells nothing about how much of a guess was right.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/regions/region.h"

namespace engram {

inline constexpr int kRegionTokenBytes = 32;
inline constexpr int kRegionIdBytes = 16;

// Where a region's memory is.
enum class RegionPlace { kHost, kDevice };

struct RegionOptions {
  int64_t memory_bytes = int64_t{1} << 30;  // of all regions and grants in the host's memory
  int64_t device_memory_bytes = 0;          // likewise on the device; 0: none there
  DeviceMemorySource device_memory = {};    // needed where device_memory_bytes is not 0
  // Regions and grants of one principal. A worker needs one; each is two descriptors and a slot in the listener's poll.
  int64_t max_per_principal = 256;
  absl::Duration token_ttl = absl::Seconds(10);
  std::function<absl::Time()> clock = [] { return absl::Now(); };
};

struct RegionGrant {
  std::string token;
  std::string id;
  int64_t bytes = 0;  // in whole pages, on the device in whole blocks
};

struct ClaimedRegion {
  std::string id;
  std::shared_ptr<Region> region;
};

struct RegionStats {
  int64_t regions = 0;  // claimed, and not dropped
  // Memory that is there: theirs, and that of dropped ones still pinned or not yet swept.
  int64_t bytes = 0;
  int64_t device_bytes = 0;
};

// REGION: the one answer for regions that are unknown, gone or another principal's, and where there are none at all.
absl::Status RefuseRegion();

// REGIONS_OFF: this server shares no memory with anyone.
absl::Status RefuseRegions();
// REGIONS_OFF: nor any of its device's.
absl::Status RefuseDeviceRegions();

// Thread-safe.
class RegionStore {
 public:
  explicit RegionStore(RegionOptions options);

  // REGION_SPAN where `bytes` is below 1 or can never fit, REGION_FULL where it does not now, DRAINING after Close(),
  // RefuseDeviceRegions() where there is no device memory to share.
  absl::StatusOr<RegionGrant> Reserve(absl::string_view principal, int64_t bytes,
                                      RegionPlace place = RegionPlace::kHost);

  // Makes the region that the token was given for, once. NOT_FOUND for anything that is not a good token;
  // RESOURCE_EXHAUSTED where the system or the device has no memory, or what else the device says, and then the token
  // is used up. Takes as long as the system needs to clear the memory (a second for 2 GB or so): not for threads that
  // calls wait for.
  absl::StatusOr<ClaimedRegion> Claim(absl::string_view token);

  // RefuseRegion() for one that is not this principal's.
  absl::StatusOr<std::shared_ptr<Region>> Find(absl::string_view principal, absl::string_view id) const;

  // Nobody finds it any more. Its memory goes with a later Sweep().
  void Drop(absl::string_view id);

  // Gives back the memory of dropped regions that no call uses any more. Whether there are some left. As slow as
  // Claim(), and meant for the same thread.
  bool Sweep();

  // No grants from now on; what there is stays.
  void Close();

  RegionStats stats() const;

 private:
  struct Grant {
    std::string id, principal;
    RegionPlace place = RegionPlace::kHost;
    int64_t bytes = 0;
    absl::Time expires;
  };
  struct Kept {
    std::string principal;
    RegionPlace place = RegionPlace::kHost;
    std::shared_ptr<Region> region;
  };
  // Of one place's memory, in bytes.
  struct Sums {
    int64_t promised = 0;  // of grants and regions, dropped ones included
    int64_t made = 0;      // of them, those of regions
  };

  absl::StatusOr<std::shared_ptr<Region>> Make(RegionPlace place, int64_t bytes) const;
  void ExpireGrants() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Sums& SumsOf(RegionPlace place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return sums_[static_cast<size_t>(place)]; }
  void GiveBack(const std::string& principal, RegionPlace place, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RegionOptions options_;
  mutable std::mutex mutex_;  // as in SessionTable
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::array<Sums, 2> sums_ ABSL_GUARDED_BY(mutex_);                          // by place
  absl::flat_hash_map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mutex_);  // by principal, of the same
  absl::flat_hash_map<std::string, Grant> grants_ ABSL_GUARDED_BY(mutex_);    // by token
  absl::flat_hash_map<std::string, Kept> regions_ ABSL_GUARDED_BY(mutex_);    // by id
  std::vector<Kept> dropped_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace engram
