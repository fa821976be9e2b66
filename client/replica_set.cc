#include "client/replica_set.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/channels.h"
#include "client/replica_core.h"

namespace engram::client {
namespace {

// 32 raw bytes of what was given; empty stays empty.
absl::StatusOr<std::string> RawDigest(absl::string_view name, const std::string& digest) {
  if (digest.empty() || digest.size() == 32) return digest;
  const bool hex = digest.size() == 64 && std::all_of(digest.begin(), digest.end(), absl::ascii_isxdigit);
  if (hex) return absl::HexStringToBytes(digest);
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has ", digest.size(), " characters, expected 64 hex digits or 32 raw bytes"));
}

absl::Status CheckOptions(const ReplicaOptions& options) {
  if (options.targets.empty()) return absl::InvalidArgumentError("targets is empty, expected at least one");
  for (const std::string& target : options.targets) {
    if (absl::Status status = CheckTarget(target); !status.ok()) return status;
  }
  const auto refuse = [](absl::string_view name, const auto& value, absl::string_view expected) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, ", expected ", expected));
  };
  if (options.channels_per_replica < 1 || options.channels_per_replica > 64) {
    return refuse("channels_per_replica", options.channels_per_replica, "1..64");
  }
  if (options.max_message_bytes < 1) return refuse("max_message_bytes", options.max_message_bytes, "at least 1");
  if (options.resolve_interval <= absl::ZeroDuration()) {
    return refuse("resolve_interval", absl::FormatDuration(options.resolve_interval), "more than 0");
  }
  const Ejection& ejection = options.ejection;
  if (ejection.failures < 1) return refuse("ejection.failures", ejection.failures, "at least 1");
  if (ejection.base < absl::Milliseconds(1)) {
    return refuse("ejection.base", absl::FormatDuration(ejection.base), "at least 1ms");
  }
  if (ejection.max < ejection.base) {
    return refuse("ejection.max", absl::FormatDuration(ejection.max),
                  absl::StrCat("at least ejection.base, ", absl::FormatDuration(ejection.base)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ReplicaSet>> ReplicaSet::Connect(const ReplicaOptions& options, Resolver resolver) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  absl::StatusOr<std::string> hash_digest = RawDigest("hash_digest", options.hash_digest);
  if (!hash_digest.ok()) return hash_digest.status();
  absl::StatusOr<std::string> config_digest = RawDigest("config_digest", options.config_digest);
  if (!config_digest.ok()) return config_digest.status();
  std::unique_ptr<ReplicaSet> set(new ReplicaSet(
      std::make_shared<Core>(options, *std::move(hash_digest), *std::move(config_digest), std::move(resolver))));
  if (absl::Status status = set->core_->Start(); !status.ok()) return status;
  return set;
}

ReplicaSet::ReplicaSet(std::shared_ptr<Core> core) : core_(std::move(core)) {}
ReplicaSet::~ReplicaSet() { core_->Stop(); }

const ModelInfo& ReplicaSet::model() const { return core_->model(); }
int64_t ReplicaSet::max_message_bytes() const { return core_->max_message_bytes(); }
int64_t ReplicaSet::max_call_tokens() const { return core_->max_call_tokens(); }
absl::StatusOr<Lease> ReplicaSet::Choose(const Wish& wish) { return core_->Choose(wish); }

bool ReplicaSet::AskNow(const std::vector<std::string>& avoid, std::function<void(const std::string& name)> then) {
  return core_->AskNow(avoid, std::move(then));
}

bool ReplicaSet::KnowsEpoch(absl::string_view replica, uint64_t server_epoch) {
  return core_->KnowsEpoch(replica, server_epoch);
}

std::vector<ReplicaStatus> ReplicaSet::Replicas() const { return core_->Replicas(); }
double ReplicaSet::Random() { return core_->Random(); }
Completions& ReplicaSet::completions() { return core_->completions(); }

ReplicaSet::Work ReplicaSet::Begin(std::function<void()> cancel) {
  Work work;
  work.id_ = core_->Begin(std::move(cancel));
  if (work.id_ != 0) work.core_ = core_;
  return work;
}

ReplicaSet::Work::Work(Work&& other) noexcept : core_(std::move(other.core_)), id_(other.id_) {}

ReplicaSet::Work::~Work() {
  if (core_ != nullptr) core_->End(id_);
}

Lease::~Lease() {
  if (core_ != nullptr) core_->Return(*replica_, tokens_);
}

const std::string& Lease::replica() const { return replica_->address.name; }

void Lease::Report(const absl::Status& status, bool draining) {
  const bool unreachable = absl::IsUnavailable(status) && channel_->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE;
  core_->Report(*replica_, generation_, status, unreachable, draining);
}

}  // namespace engram::client
