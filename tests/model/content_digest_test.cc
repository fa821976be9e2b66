// content_digest and its sidecar: who computes it, who believes whom, and bytes that are no sidecar. (What the digests
// are is settled by hash_digest_test.py.)
#include "server/model/content_digest.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "server/model/inspect.h"
#include "tests/model/small_model.h"

namespace engram {
namespace {

using ::testing::HasSubstr;

class ContentDigestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = WriteTestFile("m.gguf", ReadTestFile(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf"));
    remove(SidecarPath(path_).c_str());
    auto inspection = InspectModel(path_);
    ASSERT_TRUE(inspection.ok()) << inspection.status();
    inspection_ = std::make_unique<Inspection>(*std::move(inspection));
    auto content = DigestTables(inspection_->header, config(), 2, nullptr);
    ASSERT_TRUE(content.ok()) << content.status();
    content_ = *content;
  }

  const Digest& config() const { return inspection_->config_digest; }

  absl::StatusOr<std::shared_ptr<const EngramModel>> Load(Residency residency) {
    warnings_.clear();
    LoadOptions options;
    options.residency = residency;
    options.threads = 2;
    options.warn = [this](const std::string& line) { warnings_.push_back(line); };
    return EngramModel::Load(path_, options);
  }

  // Writes over the model's bytes from `offset` on and puts its time back.
  void Overwrite(int64_t offset, const std::string& bytes) {
    struct stat before;
    ASSERT_EQ(stat(path_.c_str(), &before), 0);
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(offset);
    file << bytes;
    file.close();
    const timespec times[] = {before.st_atim, before.st_mtim};
    ASSERT_EQ(utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);
  }

  void Touch() {
    const timespec times[] = {{1'700'000'000, 7}, {1'700'000'000, 7}};
    ASSERT_EQ(utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);
  }

  std::string path_;
  std::unique_ptr<Inspection> inspection_;
  Digest content_{};
  std::vector<std::string> warnings_;
};

TEST_F(ContentDigestTest, TablesInMemoryHaveItMappedOnesWithoutASidecarHaveNone) {
  const auto ram = Load(Residency::kRam);
  ASSERT_TRUE(ram.ok()) << ram.status();
  ASSERT_TRUE((*ram)->content_digest().has_value());
  EXPECT_EQ(DigestHex(*(*ram)->content_digest()), DigestHex(content_));
  const auto mapped = Load(Residency::kMmap);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_FALSE((*mapped)->content_digest().has_value());
  EXPECT_TRUE(warnings_.empty()) << warnings_.front();
}

TEST_F(ContentDigestTest, AMappedModelTakesItFromItsSidecar) {
  ASSERT_TRUE(WriteSidecar(inspection_->files, config(), content_).ok());
  const auto mapped = Load(Residency::kMmap);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ((*mapped)->content_digest(), content_);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(ContentDigestTest, ASidecarOfAnotherTimeIsLeftAsideWithAWarning) {
  ASSERT_TRUE(WriteSidecar(inspection_->files, config(), content_).ok());
  Touch();
  for (const Residency residency : {Residency::kMmap, Residency::kRam}) {
    const auto model = Load(residency);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->content_digest().has_value(), residency == Residency::kRam);
    ASSERT_EQ(warnings_.size(), 1u);
    EXPECT_THAT(warnings_[0], HasSubstr(SidecarPath(path_) + ": left aside: line 4 is shard "));
    EXPECT_THAT(warnings_[0], HasSubstr(" 1700000000000000007 "));
  }
}

TEST_F(ContentDigestTest, ASidecarOfAnotherConfigurationOrSizeIsRefused) {
  const auto text = SidecarText(inspection_->files, config(), content_);
  ASSERT_TRUE(text.ok()) << text.status();
  Digest other = config();
  other[31] ^= 1;
  EXPECT_THAT(std::string(ParseSidecar(*text, inspection_->files, other).status().message()),
              HasSubstr("its config_digest is " + DigestHex(config()) + "; expected " + DigestHex(other)));
  std::string grown = *text;
  grown.insert(grown.find("shard ") + 6, "1");
  EXPECT_THAT(std::string(ParseSidecar(grown, inspection_->files, config()).status().message()),
              HasSubstr("line 4 is shard 1"));
}

// The bytes rotted, size and time did not: only who reads the tables can see it.
TEST_F(ContentDigestTest, TablesThatAreNotWhatAGoodSidecarSaysDoNotLoad) {
  ASSERT_TRUE(WriteSidecar(inspection_->files, config(), content_).ok());
  const GgufTensor& table = inspection_->header.layers[1].table.tensor;
  Overwrite(table.offset + table.bytes / 2, "rot");
  const auto ram = Load(Residency::kRam);
  ASSERT_EQ(ram.status().code(), absl::StatusCode::kDataLoss) << ram.status();
  EXPECT_THAT(std::string(ram.status().message()), HasSubstr("expected " + DigestHex(content_)));
  EXPECT_THAT(std::string(ram.status().message()), HasSubstr(SidecarPath(path_)));
}

TEST_F(ContentDigestTest, AFileWrittenSinceItWasOpenedGetsNoSidecar) {
  Touch();
  const absl::Status status = WriteSidecar(inspection_->files, config(), content_);
  EXPECT_THAT(std::string(status.message()), HasSubstr("was written while it was read"));
  EXPECT_NE(access(SidecarPath(path_).c_str(), F_OK), 0);
}

TEST_F(ContentDigestTest, WhatAKilledRunOfThisProcessIdLeftIsNoHindrance) {
  const std::string left = SidecarPath(path_) + ".partial-" + std::to_string(getpid());
  std::ofstream(left) << "half";
  EXPECT_EQ(WriteSidecar(inspection_->files, config(), content_), absl::OkStatus());
  remove(left.c_str());
}

TEST_F(ContentDigestTest, EveryOtherTextIsRefusedByItsLine) {
  const auto text = SidecarText(inspection_->files, config(), content_);
  ASSERT_TRUE(text.ok()) << text.status();
  const auto parse = [&](absl::string_view bytes) { return ParseSidecar(bytes, inspection_->files, config()); };
  ASSERT_EQ(*parse(*text), content_);
  for (size_t length = 0; length < text->size(); ++length) {
    EXPECT_FALSE(parse(absl::string_view(*text).substr(0, length)).ok()) << "cut at byte " << length;
  }
  for (size_t at = 0; at < text->size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bent = *text;
      bent[at] = static_cast<char>(bent[at] ^ (1 << bit));
      const absl::StatusOr<Digest> parsed = parse(bent);
      // A bent content_digest is another one, if it still is one: nothing in the text can tell.
      EXPECT_TRUE(!parsed.ok() || *parsed != content_) << "bit " << bit << " of byte " << at;
    }
  }
  EXPECT_FALSE(parse(*text + "\n").ok());
  EXPECT_FALSE(parse(*text + *text).ok());
  EXPECT_FALSE(parse(std::string(1000, '\0')).ok());
  std::string crlf = *text;
  crlf.insert(crlf.find('\n'), "\r");
  EXPECT_THAT(std::string(parse(crlf).status().message()), HasSubstr("line 1 is engram.digest.v1\\r; expected"));
}

TEST_F(ContentDigestTest, WhatIsNoRegularFileOrTooLongIsLeftAside) {
  const std::string sidecar = SidecarPath(path_);
  ASSERT_EQ(mkfifo(sidecar.c_str(), 0600), 0);
  ASSERT_TRUE(Load(Residency::kMmap).ok()) << "a FIFO must not be waited for";
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_THAT(warnings_[0], HasSubstr("not a regular file"));
  remove(sidecar.c_str());
  std::ofstream(sidecar).close();
  ASSERT_EQ(truncate(sidecar.c_str(), (16 << 20) + 1), 0);
  ASSERT_TRUE(Load(Residency::kMmap).ok());
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_THAT(warnings_[0], HasSubstr("at most 16777216 bytes"));
  remove(sidecar.c_str());
}

}  // namespace
}  // namespace engram
