// Spans of all kinds against a region of four pages.
#include "server/transport/region_spans.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace engram {
namespace {

constexpr uint64_t kBytes = 4096;  // of a layer's highway
constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
using Offset = std::optional<uint64_t>;

class RegionSpansTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto grant = store_.Reserve("p", 4 * kBytes);
    ASSERT_TRUE(grant.ok());
    const auto claimed = store_.Claim(grant->token);
    ASSERT_TRUE(claimed.ok());
    id_ = claimed->id;
    begin_ = claimed->region->At(0, 0);
  }

  v1::LayerInput& Add(Offset highway, Offset out, uint64_t bytes = kBytes) {
    v1::LayerInput& layer = *request_.add_layers();
    const auto set = [bytes](v1::RegionSpan& span, uint64_t offset) {
      span.set_offset(offset);
      span.set_bytes(bytes);
    };
    if (highway.has_value()) set(*layer.mutable_highway_in_region(), *highway);
    if (out.has_value()) set(*layer.mutable_out_in_region(), *out);
    return layer;
  }

  RegionContext Context(Form form = Form::kHighway) const {
    return {&store_, "p", form, kernels::HighwayType::kF32, static_cast<int64_t>(kBytes)};
  }

  // What the request's layers so far come to; they are gone then.
  std::pair<RegionHighways, RefusalDetail> Resolve(const RegionContext& context, const std::string& id) {
    Refusals refusals;
    std::vector<int64_t> in_message;
    for (const v1::LayerInput& layer : request_.layers()) {
      in_message.push_back(static_cast<int64_t>(layer.highway().size()));
    }
    RegionHighways found = ResolveRegion(id, request_.layers(), in_message, context, refusals);
    request_.clear_layers();
    return {std::move(found), DetailOf(refusals.ToStatus())};
  }

  void ExpectGood(Form form = Form::kHighway) {
    const auto [found, detail] = Resolve(Context(form), id_);
    EXPECT_EQ(detail.total, 0) << (detail.offenders.empty() ? "" : detail.offenders.front().text);
    EXPECT_NE(found.region, nullptr);
  }

  void ExpectOneOffender(Reason reason, const std::string& field, Form form = Form::kHighway) {
    const auto [found, detail] = Resolve(Context(form), id_);
    ASSERT_EQ(detail.total, 1) << field;
    const Offender& offender = detail.offenders.front();
    EXPECT_EQ(ReasonName(offender.reason), ReasonName(reason));
    EXPECT_EQ(offender.field, field);
    // The region's own size and id are nobody's business.
    for (const std::string* told : {&offender.value, &offender.bound, &offender.text}) {
      EXPECT_EQ(told->find(std::to_string(4 * kBytes)), std::string::npos) << *told;
      EXPECT_EQ(told->find(id_), std::string::npos);
    }
  }

  RegionStore store_{{}};
  v1::ApplyRequest request_;
  std::string id_;
  char* begin_ = nullptr;
};

TEST_F(RegionSpansTest, PointersAreTheRegionsBeginAndTheOffset) {
  Add(0, 2 * kBytes);
  Add(kBytes, kBytes);
  const auto [found, detail] = Resolve(Context(), id_);
  EXPECT_EQ(detail.total, 0);
  ASSERT_EQ(found.layers.size(), 2);
  EXPECT_EQ(found.layers[0].highway, begin_);
  EXPECT_EQ(found.layers[0].out, begin_ + 2 * kBytes);
  EXPECT_EQ(found.layers[1].highway, begin_ + kBytes);
  EXPECT_EQ(found.layers[1].out, begin_ + kBytes);
}

TEST_F(RegionSpansTest, TheResultPinsTheRegion) {
  Add(0, 0);
  const auto [found, detail] = Resolve(Context(), id_);
  store_.Drop(id_);
  EXPECT_TRUE(store_.Sweep());
  *static_cast<char*>(found.layers[0].out) = 1;
}

TEST_F(RegionSpansTest, SpansThatLeaveTheRegionOrWrapAreRefused) {
  for (const uint64_t offset : {3 * kBytes + 4, 4 * kBytes + 8, kMost - 3, kMost - kBytes + 1, uint64_t{1} << 63}) {
    Add(offset, 0);
    ExpectOneOffender(Reason::kRegionSpan, "layers[0].highway_in_region.offset");
    Add(0, offset);
    ExpectOneOffender(Reason::kRegionSpan, "layers[0].out_in_region.offset");
  }
  Add(3 * kBytes, 3 * kBytes);
  ExpectGood();
}

TEST_F(RegionSpansTest, OffsetsAreMultiplesOfAValue) {
  for (const uint64_t offset : {1, 2, 3, 5}) {
    Add(offset, 2 * kBytes);
    ExpectOneOffender(Reason::kRegionSpan, "layers[0].highway_in_region.offset");
  }
  Add(4, 2 * kBytes);
  ExpectGood();
  Add(2, 2 * kBytes);
  RegionContext bf16 = Context();
  bf16.highway_type = kernels::HighwayType::kBf16;
  EXPECT_EQ(Resolve(bf16, id_).second.total, 0);
}

TEST_F(RegionSpansTest, ASpanOfAnotherLengthIsNoHighway) {
  for (const uint64_t bytes : {uint64_t{0}, kBytes - 4, kBytes + 4, kMost}) {
    Add(0, std::nullopt, bytes);
    ExpectOneOffender(Reason::kHighwaySize, "layers[0].highway_in_region.bytes", Form::kUpdate);
  }
}

TEST_F(RegionSpansTest, EveryLayerSaysWhere) {
  Add(std::nullopt, 0);
  ExpectOneOffender(Reason::kRegionSpan, "layers[0].highway_in_region");
  Add(0, std::nullopt);
  ExpectOneOffender(Reason::kRegionSpan, "layers[0].out_in_region");
  Add(0, 0).set_highway("x");
  ExpectOneOffender(Reason::kHighwaySize, "layers[0].highway");
}

TEST_F(RegionSpansTest, FormsThatAnswerInTheMessageWriteNothingHere) {
  for (const Form form : {Form::kUpdate, Form::kGate}) {
    Add(0, std::nullopt);
    Add(0, std::nullopt);  // read twice
    Add(8, std::nullopt);
    ExpectGood(form);
    Add(0, 0);
    ExpectOneOffender(Reason::kRegionSpan, "layers[0].out_in_region", form);
  }
  Add(0, 0);
  ExpectOneOffender(Reason::kForm, "region", Form::kKv);
}

TEST_F(RegionSpansTest, WhatIsWrittenIsTheHighwayItselfOrApart) {
  Add(0, 4);  // partly itself
  ExpectOneOffender(Reason::kRegionSpan, "layers[0].out_in_region.offset");
  Add(4, 0);
  ExpectOneOffender(Reason::kRegionSpan, "layers[0].highway_in_region.offset");
  Add(0, 2 * kBytes);
  Add(kBytes, 3 * kBytes - 4);  // another's out
  ExpectOneOffender(Reason::kRegionSpan, "layers[1].out_in_region.offset");
  Add(0, 2 * kBytes);
  Add(kBytes, 2 * kBytes);  // the very same out
  ExpectOneOffender(Reason::kRegionSpan, "layers[1].out_in_region.offset");
  Add(0, 0);
  Add(0, 2 * kBytes);  // reads what another writes in place
  ExpectOneOffender(Reason::kRegionSpan, "layers[1].highway_in_region.offset");
  // In place, on what another layer reads from a little earlier on.
  Add(kBytes, kBytes);
  Add(kBytes - 4, 3 * kBytes);
  ExpectOneOffender(Reason::kRegionSpan, "layers[0].out_in_region.offset");
  Add(0, 2 * kBytes);
  Add(0, 3 * kBytes);  // one highway read by two
  ExpectGood();
  Add(kBytes, kBytes);
  Add(0, 0);
  Add(2 * kBytes, 3 * kBytes);
  ExpectGood();
}

TEST_F(RegionSpansTest, ARegionThatIsNotTheCallersIsRefusedAsAnUnknownOne) {
  RegionContext other = Context();
  other.principal = "other";
  RegionContext none = Context();
  none.regions = nullptr;
  Add(0, 0);
  const RefusalDetail unknown = Resolve(Context(), std::string(16, 'x')).second;
  ASSERT_EQ(unknown.total, 1);
  EXPECT_EQ(ReasonName(unknown.offenders[0].reason), "REGION");
  for (const auto& [context, id] : {std::pair(other, id_), {none, id_}, {Context(), id_ + "x"}}) {
    Add(0, 0);
    const RefusalDetail detail = Resolve(context, id).second;
    ASSERT_EQ(detail.total, 1);
    EXPECT_EQ(detail.offenders[0].text, unknown.offenders[0].text);
    EXPECT_EQ(detail.offenders[0].value, unknown.offenders[0].value);
  }
}

TEST_F(RegionSpansTest, WithoutARegionThereAreNoSpans) {
  Add(0, 0);
  const RefusalDetail detail = Resolve(Context(), "").second;
  EXPECT_EQ(detail.total, 2);
  EXPECT_EQ(ReasonName(detail.offenders[0].reason), "REGION_SPAN");
  request_.add_layers()->set_highway("abc");
  const auto [found, good] = Resolve(Context(), "");
  EXPECT_EQ(good.total, 0);
  EXPECT_EQ(found.region, nullptr);
}

}  // namespace
}  // namespace engram
