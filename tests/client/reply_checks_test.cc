#include "client/verify/reply_checks.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace engram::client {
namespace {

std::string Nowhere() { return "here"; }

StageResult KvResult(double exact, float reply) {
  StageResult result("kv");
  // The other value keeps the rms, and with it the tolerance for cancellation, small.
  CheckKv(std::vector<double>{exact, 0}, std::vector<float>{reply, 0}, 2, Nowhere, &result);
  return result;
}

TEST(CheckKv, OneUlpPassesAndThreeMiss) {
  constexpr float kUlp = 0x1p-7f;  // of numbers in [1, 2)
  EXPECT_TRUE(KvResult(1.0 + kUlp / 2, 1.0f).passed());
  EXPECT_TRUE(KvResult(1.5, 1.5f + kUlp).passed());
  EXPECT_FALSE(KvResult(1.5, 1.5f + 3 * kUlp).passed());
  EXPECT_FALSE(KvResult(1.5, -1.5f).passed());
}

TEST(CheckKv, WhereTermsCancelTheRmsOfTheCopyCounts) {
  const std::vector<double> exact = {1e-6, 1.0, 1.0, 1.0};
  StageResult near("kv"), far("kv");
  CheckKv(exact, std::vector<float>{0.003f, 1, 1, 1}, 4, Nowhere, &near);
  CheckKv(exact, std::vector<float>{0.004f, 1, 1, 1}, 4, Nowhere, &far);
  EXPECT_TRUE(near.passed());
  EXPECT_FALSE(far.passed());
}

TEST(CheckKv, NanIsAMissAndNothingComparedIsNoPass) {
  EXPECT_FALSE(KvResult(1.0, std::numeric_limits<float>::quiet_NaN()).passed());
  EXPECT_FALSE(StageResult("empty").passed());
  EXPECT_FALSE(KvResult(0.0, 1e-30f).passed()) << "a copy of zeros has no tolerance but its smallest step";
}

TEST(CheckUpdate, TheToleranceIsThatOfTwoRoundings) {
  const std::vector<float> h = {1.0f, -2.0f}, v = {0.5f, 0.25f};
  const double gate = 0.7;
  std::vector<float> out;
  for (int i = 0; i < 2; ++i) out.push_back(h[i] + static_cast<float>(gate) * v[i]);
  StageResult good("update"), off("update");
  CheckUpdate(gate, 0, h, v, out, Nowhere, &good);
  EXPECT_TRUE(good.passed());
  CheckUpdate(gate + 1e-5, 0, h, v, out, Nowhere, &off);
  EXPECT_FALSE(off.passed());
}

TEST(BoundGate, SameBitsLeaveNoRoom) {
  const std::vector<float> h = {1, 2, 3}, k = {0.5f, -1, 2};
  const GateBounds bounds = BoundGate(0.6, h, k, h, k, 1e-20);
  EXPECT_TRUE(bounds.exact());
  EXPECT_EQ(FitGate(bounds, h, k, h), 0.6) << "an exact gate is not fitted to what the server did";
}

// The gate as engram.md 3 has it, to see that the bounds hold it for weights up to kMaxGateWeight.
double Gate(const std::vector<float>& h, const std::vector<float>& w, const std::vector<float>& k, double eps) {
  double hh = 0, kk = 0, dot = 0;
  for (size_t i = 0; i < h.size(); ++i) {
    hh += double{h[i]} * h[i];
    kk += double{k[i]} * k[i];
    dot += double{h[i]} * w[i] * k[i];
  }
  const auto n = static_cast<double>(h.size());
  dot /= std::sqrt((hh / n + eps) * (kk / n + eps) * n);
  return 1 / (1 + std::exp(-std::copysign(std::sqrt(std::max(std::abs(dot), 1e-6)), dot)));
}

TEST(BoundGate, HoldsTheGateOfAKeyOneUlpOffAndIsNarrow) {
  std::vector<float> h, w, k;
  for (int i = 0; i < 64; ++i) {
    h.push_back(std::sin(1.0f + 3 * i));
    w.push_back(1 + 1.5f * std::cos(2.0f * i));
    k.push_back(0.3f * std::cos(0.5f + 5 * i));
  }
  for (int changed = 0; changed < 64; ++changed) {
    std::vector<float> other = k;
    other[changed] *= 1 + 0x1p-7f;
    const GateBounds bounds = BoundGate(Gate(h, w, k, 1e-20), h, k, h, other, 1e-20);
    const double gate = Gate(h, w, other, 1e-20);
    EXPECT_LE(bounds.low, gate);
    EXPECT_GE(bounds.high, gate);
    EXPECT_LT(bounds.high - bounds.low, 0.02);
  }
}

TEST(BoundGate, AtTheClampBothSignsStayPossible) {
  const double clamped = 1 / (1 + std::exp(-1e-3));
  const std::vector<float> h = {1, 1}, k = {1, -1}, other = {1, -1.0078125f};
  const GateBounds bounds = BoundGate(clamped, h, k, h, other, 1e-20);
  EXPECT_LT(bounds.low, 0.5);
  EXPECT_GT(bounds.high, 0.5);
}

TEST(FitGate, FindsTheGateInsideTheBoundsAndNeverLeavesThem) {
  const std::vector<float> h = {1, 2, 3}, v = {0.5f, -1, 0};
  std::vector<float> out;
  for (int i = 0; i < 3; ++i) out.push_back(h[i] + 0.625f * v[i]);
  EXPECT_NEAR(FitGate({0.6, 0.7}, h, v, out), 0.625, 1e-7);
  EXPECT_EQ(FitGate({0.63, 0.7}, h, v, out), 0.63);
  out[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(FitGate({0.6, 0.7}, h, v, out), 0.6);
}

}  // namespace
}  // namespace engram::client
