// A table beyond 4 GiB, served: a token whose only row is the table's last. Row times bytes passes 32 bits.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "server/model/gguf_writer.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

constexpr int64_t kDim = 32;
constexpr int64_t kRowBytes = 84;

bool IsPrime(int64_t n) {
  for (int64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return n >= 2;
}

TEST(LastRowTest, TheLastRowOfASparseTableBeyond4GiBIsServedInBothResidencies) {
  int64_t rows = 52'000'000;
  while (!IsPrime(rows)) ++rows;
  ASSERT_GT(rows * kRowBytes, int64_t{1} << 32);

  // 2-grams, one head: row = (id_0 * m_0 ^ id_1 * m_1) mod rows. At position 0 id_1 is the pad, 0; with m_0 = 2 rows -
  // 1 (odd, as it must be) token 1 falls on row rows - 1 and token 0 on row 0.
  GgufWriter file;
  file.AddText("general.architecture", "deepseek41");
  file.Add<uint32_t>("deepseek41.embedding_length", kDim);
  file.Add<uint32_t>("deepseek41.hyper_connection.count", 1);
  file.Add<float>("deepseek41.attention.layer_norm_rms_epsilon", 1e-20f);
  file.AddArray("deepseek41.engram.layer_ids", std::vector<int32_t>{3});
  file.Add<uint32_t>("deepseek41.engram.head_count", 1);
  file.Add<uint32_t>("deepseek41.engram.key_length", 256);
  file.Add<uint32_t>("deepseek41.engram.max_ngram_size", 2);
  file.Add<uint32_t>("deepseek41.engram.pad_id", 0);
  file.AddArray("deepseek41.engram.multipliers", std::vector<uint64_t>{static_cast<uint64_t>(2 * rows - 1), 1});
  file.AddArray("deepseek41.engram.primes", std::vector<uint64_t>{static_cast<uint64_t>(rows)});
  file.AddArray("deepseek41.engram.offsets", std::vector<uint64_t>{0});
  file.AddArray("deepseek41.engram.token_map", std::vector<int32_t>{0, 1});

  // wkv picks value o of the row for output o.
  std::string wkv(static_cast<size_t>(2 * kDim * 256 * 2), '\0');
  for (int64_t o = 0; o < 2 * kDim; ++o) {
    const uint16_t one = 0x3f80;
    std::memcpy(wkv.data() + (o * 256 + o) * 2, &one, 2);
  }
  const std::vector<float> ones(kDim, 1.0f);
  const std::string weights(reinterpret_cast<const char*>(ones.data()), ones.size() * 4);
  file.AddTensor("blk.3.engram_wkv.weight", {256, 2 * kDim}, GgufType::kBF16, wkv);
  file.AddTensor("blk.3.engram_q.weight", {kDim, 1}, GgufType::kF32, weights);
  file.AddTensor("blk.3.engram_k.weight", {kDim, 1}, GgufType::kF32, weights);
  file.AddTensor("blk.3.engram_embd.weight", {256, static_cast<uint64_t>(rows)}, GgufType::kQ2_K);

  // The last row is all 3: scale 1, min 0, codes 3, d = 1. Everything before it is a hole, which reads as zeros.
  std::string row(kRowBytes, '\0');
  std::memset(row.data(), 0x01, 16);
  std::memset(row.data() + 16, 0xff, 64);
  row[81] = 0x3c;

  const TempDir dir;
  const std::string path = dir.path() + "/large.gguf";
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT, 0600);
  ASSERT_GE(fd, 0);
  const std::string header = file.Header();
  const auto put = [fd](const std::string& bytes, int64_t at) {
    return ::pwrite(fd, bytes.data(), bytes.size(), at) == static_cast<ssize_t>(bytes.size());
  };
  ASSERT_TRUE(put(header, 0));
  ASSERT_TRUE(put(wkv, file.DataOffset("blk.3.engram_wkv.weight")));
  ASSERT_TRUE(put(weights, file.DataOffset("blk.3.engram_q.weight")));
  ASSERT_TRUE(put(weights, file.DataOffset("blk.3.engram_k.weight")));
  ASSERT_TRUE(put(row, file.DataOffset("blk.3.engram_embd.weight") + (rows - 1) * kRowBytes));
  ::close(fd);

  for (const char* residency : {"mmap", "ram"}) {
    auto server = ServerProcess::Start(path, {"--residency", residency});
    ASSERT_TRUE(server.ok()) << server.status();
    Rpc rpc((*server)->unix_address());
    EXPECT_EQ(rpc.Model().layers(0).rows(), rows);
    v1::ApplyRequest request;
    request.set_form(v1::FORM_KV);
    AddSequence(request, {"", 0, {1}, {}, {}});
    AddSequence(request, {"", 0, {0}, {}, {}});
    request.add_layers()->set_layer_id(3);
    const Answer answer = rpc.Apply(request);
    ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
    std::string expected;
    for (int64_t o = 0; o < 2 * kDim; ++o) expected += std::string("\x40\x40", 2);  // bf16 3.0
    EXPECT_EQ(answer.response.layers(0).kv(), expected + std::string(expected.size(), '\0')) << residency;
  }
}

}  // namespace
}  // namespace engram::e2e
