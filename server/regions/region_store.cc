#include "server/regions/region_store.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

absl::StatusOr<std::string> RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t have = 0; have < count;) {
    const ssize_t got = ::getrandom(bytes.data() + have, count - have, 0);
    if (got < 0 && errno != EINTR) return absl::InternalError("the system gives no random bytes");
    if (got > 0) have += static_cast<size_t>(got);
  }
  return bytes;
}

int64_t InWhole(RegionPlace place, int64_t bytes) {
  if (place == RegionPlace::kHost) return WholePages(bytes);
  return (bytes + kDeviceBlockBytes - 1) / kDeviceBlockBytes * kDeviceBlockBytes;
}

}  // namespace

RegionStore::RegionStore(RegionOptions options) : options_(std::move(options)) {}

absl::StatusOr<RegionGrant> RegionStore::Reserve(absl::string_view principal, int64_t bytes, RegionPlace place) {
  const bool on_device = place == RegionPlace::kDevice;
  if (on_device && options_.device_memory_bytes == 0) return RefuseDeviceRegions();
  const int64_t most = on_device ? options_.device_memory_bytes : options_.memory_bytes;
  if (bytes < 1 || bytes > most) {
    return Refuse(
        {Reason::kRegionSpan, "bytes", absl::StrCat(bytes), absl::StrCat("[1, ", most, "]"),
         absl::StrCat("a region of ", bytes, " bytes; all regions together may have ", most, ", and each at least 1")});
  }
  absl::StatusOr<std::string> token = RandomBytes(kRegionTokenBytes);
  if (!token.ok()) return token.status();
  absl::StatusOr<std::string> id = RandomBytes(kRegionIdBytes);
  if (!id.ok()) return id.status();
  // The last page or block may go beyond the limit; a region of exactly the limit must fit.
  const int64_t whole = InWhole(place, bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return RefuseDraining();
  ExpireGrants();
  int64_t& count = counts_[principal];
  if (count >= options_.max_per_principal) {
    return Refuse({Reason::kRegionFull, "bytes", absl::StrCat(bytes),
                   absl::StrCat("<= ", options_.max_per_principal, " regions"),
                   absl::StrCat("a caller may have ", options_.max_per_principal, " regions: close some")});
  }
  if (whole > InWhole(place, most) - SumsOf(place).promised) {
    if (count == 0) counts_.erase(principal);
    return Refuse({Reason::kRegionFull, "bytes", absl::StrCat(bytes), absl::StrCat("<= ", most),
                   absl::StrCat(bytes, " bytes do not fit now: all regions together may have ", most)});
  }
  ++count;
  SumsOf(place).promised += whole;
  grants_.emplace(*token, Grant{*id, std::string(principal), place, whole, options_.clock() + options_.token_ttl});
  return RegionGrant{*std::move(token), *std::move(id), whole};
}

absl::StatusOr<ClaimedRegion> RegionStore::Claim(absl::string_view token) {
  Grant grant;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ExpireGrants();
    const auto found = grants_.find(token);
    if (found == grants_.end()) return absl::NotFoundError("no good token");
    grant = std::move(found->second);
    grants_.erase(found);
  }
  absl::StatusOr<std::shared_ptr<Region>> region = Make(grant.place, grant.bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!region.ok()) {
    GiveBack(grant.principal, grant.place, grant.bytes);
    return region.status();
  }
  SumsOf(grant.place).made += grant.bytes;
  regions_.emplace(grant.id, Kept{std::move(grant.principal), grant.place, *region});
  return ClaimedRegion{std::move(grant.id), *std::move(region)};
}

absl::StatusOr<std::shared_ptr<Region>> RegionStore::Make(RegionPlace place, int64_t bytes) const {
  if (place == RegionPlace::kHost) return Region::Create(bytes);
  absl::StatusOr<DeviceMemory> memory = options_.device_memory(bytes);
  if (!memory.ok()) return memory.status();
  return Region::OnDevice(*std::move(memory), bytes);
}

absl::StatusOr<std::shared_ptr<Region>> RegionStore::Find(absl::string_view principal, absl::string_view id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (id.size() != kRegionIdBytes) return RefuseRegion();  // before a long one is hashed
  const auto found = regions_.find(id);
  if (found == regions_.end() || found->second.principal != principal) return RefuseRegion();
  return found->second.region;
}

void RegionStore::Drop(absl::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end()) return;
  dropped_.push_back(std::move(found->second));
  regions_.erase(found);
}

bool RegionStore::Sweep() {
  std::vector<Kept> unused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Nobody finds them any more, so a count of one stays one.
    const auto first =
        std::partition(dropped_.begin(), dropped_.end(), [](const Kept& kept) { return kept.region.use_count() > 1; });
    std::move(first, dropped_.end(), std::back_inserter(unused));
    dropped_.erase(first, dropped_.end());
  }
  for (Kept& kept : unused) {
    const int64_t bytes = kept.region->bytes();
    kept.region.reset();
    const std::lock_guard<std::mutex> lock(mutex_);
    SumsOf(kept.place).made -= bytes;
    GiveBack(kept.principal, kept.place, bytes);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return !dropped_.empty();
}

void RegionStore::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
}

RegionStats RegionStore::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {static_cast<int64_t>(regions_.size()), sums_[0].made, sums_[1].made};
}

void RegionStore::ExpireGrants() {
  const absl::Time now = options_.clock();
  for (auto it = grants_.begin(); it != grants_.end();) {
    const auto grant = it++;
    if (grant->second.expires > now) continue;
    GiveBack(grant->second.principal, grant->second.place, grant->second.bytes);
    grants_.erase(grant);
  }
}

void RegionStore::GiveBack(const std::string& principal, RegionPlace place, int64_t bytes) {
  SumsOf(place).promised -= bytes;
  const auto count = counts_.find(principal);
  if (--count->second == 0) counts_.erase(count);
}

absl::Status RefuseRegion() {
  return Refuse({Reason::kRegion, "region", "", "a region of this caller's at this server",
                 "no such region (any more): its connection has ended, it is another caller's, or another server's: "
                 "open one"});
}

absl::Status RefuseRegions() {
  return Refuse({Reason::kRegionsOff, "region", "", "a server with --shm-listen",
                 "this server shares no memory: it was started without --shm-listen"});
}

absl::Status RefuseDeviceRegions() {
  return Refuse({Reason::kRegionsOff, "on_device", "true", "a server on a GPU with --device-region-bytes",
                 "this server shares no memory of a device: it computes on a CPU, or was started without "
                 "--device-region-bytes"});
}

}  // namespace engram
