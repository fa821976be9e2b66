#include "client/reply_reader.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/error_details.h"
#include "client/reply_landing.h"
#include "engram/v1/engram.pb.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::HasSubstr;

grpc::ByteBuffer Buffer(const std::string& bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += slice_bytes) slices.emplace_back(bytes.substr(at, slice_bytes));
  return {slices.data(), slices.size()};
}

// Three tokens of two sequences through layers 1 and 14, HIGHWAY f32: 96 bytes a layer.
class ReplyReaderTest : public testing::Test {
 protected:
  ReplyReaderTest() {
    call_.sequences = {{.token_ids = absl::MakeConstSpan(ids_).subspan(0, 1)},
                       {.token_ids = absl::MakeConstSpan(ids_).subspan(1)}};
    for (size_t l = 0; l < 2; ++l) {
      out_[l] = std::string(96, 'o');
      call_.layers.push_back({.layer_id = l == 0 ? 1 : 14, .highway = in_, .out = absl::MakeSpan(out_[l])});
      v1::LayerOutput& layer = *good_.add_layers();
      layer.set_layer_id(l == 0 ? 1 : 14);
      std::string bytes(96, ' ');
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 3 + l);
      layer.set_highway(bytes);
    }
    good_.set_server_epoch(99);
  }

  // The outcome of a reply to the call, which is one part; landed where it is OK.
  absl::Status Land(const std::string& bytes, size_t slice_bytes = 7) {
    const CheckedCall checked = CheckApply(model_, call_).value();
    const CallPlan plan =
        PlanCall(model_, {.max_message_bytes = 64 << 20, .max_call_tokens = 64, .stripe_bytes = 0}, checked).value();
    absl::StatusOr<Reply> reply = Reply::Parse(Method::kApply, plan.parts[0], Buffer(bytes, slice_bytes));
    if (!reply.ok()) return reply.status();
    if (absl::Status status = CheckReply(checked, plan.parts[0], *reply); !status.ok()) return status;
    EXPECT_EQ(reply->server_epoch(), 99u);
    std::vector<bool> refused(checked.sequences.size());
    for (size_t i = 0; i < reply->sequences().size(); ++i) refused[i] = !reply->sequences()[i].ok();
    LandPart(model_, checked, plan.parts[0], *reply, refused);
    return absl::OkStatus();
  }

  void ExpectFault(const std::string& bytes, const std::string& text) {
    const absl::Status status = Land(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_EQ(out_[0] + out_[1], std::string(192, 'o')) << "nothing is written";
  }

  const ModelInfo model_ = SampleModel();
  const std::vector<int32_t> ids_ = {5, 6, 7};
  const std::string in_ = std::string(96, 'i');
  std::string out_[2];
  ApplyCall call_;
  v1::ApplyResponse good_;
};

TEST_F(ReplyReaderTest, PayloadsLandHoweverTheMessageWasSliced) {
  for (const size_t slice : {1, 2, 5, 31, 64, 1000}) {
    for (std::string& out : out_) out.assign(96, 'o');  // where they lie: the call points there
    ASSERT_TRUE(Land(good_.SerializeAsString(), slice).ok());
    EXPECT_EQ(out_[0], good_.layers(0).highway());
    EXPECT_EQ(out_[1], good_.layers(1).highway());
  }
}

TEST_F(ReplyReaderTest, OtherLayersAndSizesThanAskedForAreFaults) {
  v1::ApplyResponse bad = good_;
  bad.mutable_layers()->RemoveLast();
  ExpectFault(bad.SerializeAsString(), "has 1 layers, 2 were asked for");
  bad = good_;
  *bad.add_layers() = good_.layers(0);
  ExpectFault(bad.SerializeAsString(), "more than the 2 layers");
  bad = good_;
  bad.mutable_layers()->SwapElements(0, 1);
  ExpectFault(bad.SerializeAsString(), "layers[0].layer_id 14, expected 1");
  bad = good_;
  bad.mutable_layers(1)->mutable_highway()->pop_back();
  ExpectFault(bad.SerializeAsString(), "95 bytes in layers[1].highway, expected 96");
  bad = good_;
  bad.mutable_layers(1)->clear_highway();
  bad.mutable_layers(1)->set_kv(std::string(96, 'r'));
  ExpectFault(bad.SerializeAsString(), "0 bytes in layers[1].highway, expected 96");
  ExpectFault("", "has 0 layers");
}

TEST_F(ReplyReaderTest, AMessageThatIsNoneIsAFaultByName) {
  const std::string good = good_.SerializeAsString();
  // Every prefix: what breaks off in a field is a fault, what ends between two lacks layers or the epoch.
  for (size_t size = 0; size < good.size() - 9; ++size) ExpectFault(good.substr(0, size), "the server's Apply reply");
  const std::string layer = "\x08\x01\x12\x01x";
  ExpectFault(absl::StrCat("\x0a\x05", layer.substr(0, 3), "\x7f", "x"),
              "layers[0].highway claims 127 bytes, 1 are left");
  ExpectFault(absl::StrCat("\x0a\x08", layer, "\x12\x01y"), "layers[0].highway is there twice");
  ExpectFault(absl::StrCat("\x0a\x07", layer, "\x08\x01"), "layers[0].layer_id is there twice");
  ExpectFault(absl::StrCat("\x0a\x02", "\x10\x05"), "layers[0].highway has wire type 0, expected 2");
  ExpectFault("\x0a\xff\xff\xff\xff\x0f", "layers[0] claims 4294967295 bytes, 0 are left");
  ExpectFault("\x08\x01", "layers[0] has wire type 0");
  ExpectFault("\x11\x01\x02", "server_epoch is no number");
  ExpectFault(std::string("\x00\x01", 2), "breaks off");
  ExpectFault("\x0b", "layers[0] has wire type 3");
  ExpectFault("\x53\x53\x53", "breaks off");  // groups that never end
}

// What a newer server may add is passed over, at both levels.
TEST_F(ReplyReaderTest, UnknownFieldsArePassedOver) {
  std::string layer = good_.layers(0).SerializeAsString();
  const std::string unknown("\xa0\x06\x05\xaa\x06\x02xy", 8);  // field 100, varint; field 101, bytes
  v1::ApplyResponse rest = good_;
  rest.mutable_layers()->DeleteSubrange(0, 1);
  layer += unknown;
  ASSERT_TRUE(Land(absl::StrCat("\x0a", std::string(1, static_cast<char>(layer.size())), layer, unknown,
                                rest.SerializeAsString()))
                  .ok());
  EXPECT_EQ(out_[0], good_.layers(0).highway());
}

TEST_F(ReplyReaderTest, ServedTokensOfAPartialCallFindTheirPlaces) {
  call_.partial_ok = true;
  ExpectFault(good_.SerializeAsString(), "has 0 sequences, 2 were sent");
  v1::ApplyResponse reply = good_;
  google::rpc::Status& refused = *reply.add_sequences()->mutable_refused();
  refused.set_code(3);
  refused.set_message("no");
  reply.add_sequences();
  ExpectFault(reply.SerializeAsString(), "96 bytes in layers[0].highway, expected 64");
  for (int l = 0; l < 2; ++l) reply.mutable_layers(l)->mutable_highway()->resize(64);
  ASSERT_TRUE(Land(reply.SerializeAsString()).ok());
  EXPECT_EQ(out_[0], std::string(32, 'o') + good_.layers(0).highway().substr(0, 64));
  refused.set_code(0);
  for (std::string& out : out_) out.assign(96, 'o');  // where they lie: the call points there
  ExpectFault(reply.SerializeAsString(), "sequences[0].refused has code 0");
}

// Bits that flip make another message or a fault, never a crash or a read past the end.
TEST_F(ReplyReaderTest, FlippedBitsNeverCrash) {
  const std::string good = good_.SerializeAsString();
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = good;
    for (int flips = 0; flips < 1 + i % 3; ++flips) {
      // The heads of the fields are where it hurts.
      const size_t at = random() % (i % 2 == 0 ? size_t{6} : bytes.size());
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
    }
    const CheckedCall checked = CheckApply(model_, call_).value();
    Part part;
    part.pieces = {{0, 0, 1}, {1, 0, 2}};
    part.tokens = 3;
    part.layers = 2;
    absl::StatusOr<Reply> reply = Reply::Parse(Method::kApply, part, Buffer(bytes, 16));
    if (reply.ok() && CheckReply(checked, part, *reply).ok()) LandPart(model_, checked, part, *reply, {false, false});
  }
}

}  // namespace
}  // namespace engram::client
