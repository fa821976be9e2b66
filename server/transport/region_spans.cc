#include "server/transport/region_spans.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace engram {
namespace {

// One place of a call's, in bytes of its region; within it, so ends do not wrap.
struct Place {
  uint64_t begin = 0;
  uint64_t end = 0;
  bool written = false;
  size_t layer = 0;
};

class RegionResolver {
 public:
  RegionResolver(const RegionContext& context, Refusals& refusals) : context_(context), refusals_(refusals) {}

  RegionHighways Resolve(absl::string_view id, const google::protobuf::RepeatedPtrField<v1::LayerInput>& layers,
                         const std::vector<int64_t>& in_message) {
    if (id.empty()) {
      Absent(layers);
      return {};
    }
    if (!ReadsHighway(context_.form)) {
      Add(Reason::kForm, "region", "set", "absent", "a region holds highways, and this form reads none");
      return {};
    }
    const absl::StatusOr<std::shared_ptr<Region>> region =
        context_.regions == nullptr ? RefuseRegion() : context_.regions->Find(context_.principal, id);
    if (!region.ok()) {
      for (const Offender& offender : DetailOf(region.status()).offenders) refusals_.Add(offender);
      return {};
    }
    RegionHighways found{.region = *region, .layers = {}};
    for (int i = 0; i < layers.size(); ++i) {
      const auto index = static_cast<size_t>(i);
      found.layers.push_back(Layer(**region, layers[i], in_message[index], index));
    }
    CheckOverlaps();
    return found;
  }

 private:
  void Add(Reason reason, std::string field, std::string value, std::string bound, std::string text) {
    refusals_.Add({reason, std::move(field), std::move(value), std::move(bound), std::move(text)});
  }

  static std::string Name(size_t layer, bool written) {
    return absl::StrCat("layers[", layer, "].", written ? "out_in_region" : "highway_in_region");
  }

  void Absent(const google::protobuf::RepeatedPtrField<v1::LayerInput>& layers) {
    for (int i = 0; i < layers.size(); ++i) {
      if (layers[i].has_highway_in_region()) Unwanted(static_cast<size_t>(i), false, "a span goes with `region`");
      if (layers[i].has_out_in_region()) Unwanted(static_cast<size_t>(i), true, "a span goes with `region`");
    }
  }

  void Unwanted(size_t layer, bool written, std::string text) {
    Add(Reason::kRegionSpan, Name(layer, written), "set", "absent", std::move(text));
  }

  RegionLayer Layer(const Region& region, const v1::LayerInput& layer, int64_t in_message, size_t index) {
    if (in_message > 0) {
      Add(Reason::kHighwaySize, absl::StrCat("layers[", index, "].highway"), absl::StrCat(in_message), "0",
          absl::StrCat("the highway stands in the region, got ", in_message, " bytes of one too"));
    }
    RegionLayer found;
    found.highway = Span(region, layer.has_highway_in_region(), layer.highway_in_region(), index, false);
    if (context_.form == Form::kHighway) {
      found.out = Span(region, layer.has_out_in_region(), layer.out_in_region(), index, true);
      return found;
    }
    if (layer.has_out_in_region()) Unwanted(index, true, "FORM_UPDATE and FORM_GATE answer in the message");
    return found;
  }

  char* Span(const Region& region, bool given, const v1::RegionSpan& span, size_t index, bool written) {
    const std::string expected = absl::StrCat(context_.highway_bytes);
    if (!given) {
      Add(Reason::kRegionSpan, Name(index, written), "absent", absl::StrCat("a span of ", expected, " bytes"),
          "a call with a region says where each layer's highway stands");
      return nullptr;
    }
    if (span.bytes() != static_cast<uint64_t>(context_.highway_bytes)) {
      Add(Reason::kHighwaySize, absl::StrCat(Name(index, written), ".bytes"), absl::StrCat(span.bytes()), expected,
          absl::StrCat("the call's highway of a layer has ", expected, " bytes, the span ", span.bytes()));
      return nullptr;
    }
    const auto value = static_cast<uint64_t>(kernels::HighwayBytesPerValue(context_.highway_type));
    if (span.offset() % value != 0) {
      Add(Reason::kRegionSpan, absl::StrCat(Name(index, written), ".offset"), absl::StrCat(span.offset()),
          absl::StrCat("a multiple of ", value),
          absl::StrCat("offset ", span.offset(), " is no multiple of the ", value, " bytes of a value"));
      return nullptr;
    }
    char* at = region.At(span.offset(), span.bytes());
    if (at == nullptr) {
      Add(Reason::kRegionSpan, absl::StrCat(Name(index, written), ".offset"), absl::StrCat(span.offset()),
          "within the region",
          absl::StrCat(span.bytes(), " bytes at offset ", span.offset(), " are not all in the region"));
      return nullptr;
    }
    places_.push_back({span.offset(), span.offset() + span.bytes(), written, index});
    return at;
  }

  // All places are of one length, so in the order of their begins those that overlap one stand right before it. What is
  // only read may be read twice.
  void CheckOverlaps() {
    std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
      return std::tie(a.begin, a.layer, a.written) < std::tie(b.begin, b.layer, b.written);
    });
    for (size_t i = 1; i < places_.size(); ++i) {
      for (size_t j = i; j > 0 && places_[j - 1].end > places_[i].begin; --j) {
        if (Clash(places_[j - 1], places_[i])) break;
      }
    }
  }

  bool Clash(const Place& earlier, const Place& place) {
    if (!earlier.written && !place.written) return false;
    if (earlier.layer == place.layer && earlier.begin == place.begin) return false;  // in place
    const std::string other = Name(earlier.layer, earlier.written);
    Add(Reason::kRegionSpan, absl::StrCat(Name(place.layer, place.written), ".offset"), absl::StrCat(place.begin),
        absl::StrCat("no overlap with ", other),
        absl::StrCat("it overlaps ", other, ": what is written is a layer's highway itself, or apart from all others"));
    return true;
  }

  const RegionContext& context_;
  Refusals& refusals_;
  std::vector<Place> places_;
};

}  // namespace

RegionHighways ResolveRegion(absl::string_view region, const google::protobuf::RepeatedPtrField<v1::LayerInput>& layers,
                             const std::vector<int64_t>& in_message, const RegionContext& context, Refusals& refusals) {
  return RegionResolver(context, refusals).Resolve(region, layers, in_message);
}

}  // namespace engram
