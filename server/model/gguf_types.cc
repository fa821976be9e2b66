#include "server/model/gguf_types.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace engram {
namespace {

struct NumberedTraits {
  GgufType type;
  GgufTypeTraits traits;
};

constexpr NumberedTraits kTypes[] = {
    {GgufType::kF32, {"F32", 1, 4}},
    {GgufType::kF16, {"F16", 1, 2}},
    {GgufType::kQ4_0, {"Q4_0", 32, 18}},
    {GgufType::kQ4_1, {"Q4_1", 32, 20}},
    {GgufType::kQ5_0, {"Q5_0", 32, 22}},
    {GgufType::kQ5_1, {"Q5_1", 32, 24}},
    {GgufType::kQ8_0, {"Q8_0", 32, 34}},
    {GgufType::kQ8_1, {"Q8_1", 32, 36}},
    {GgufType::kQ2_K, {"Q2_K", 256, 84}},
    {GgufType::kQ3_K, {"Q3_K", 256, 110}},
    {GgufType::kQ4_K, {"Q4_K", 256, 144}},
    {GgufType::kQ5_K, {"Q5_K", 256, 176}},
    {GgufType::kQ6_K, {"Q6_K", 256, 210}},
    {GgufType::kQ8_K, {"Q8_K", 256, 292}},
    {GgufType::kIQ2_XXS, {"IQ2_XXS", 256, 66}},
    {GgufType::kIQ2_XS, {"IQ2_XS", 256, 74}},
    {GgufType::kIQ3_XXS, {"IQ3_XXS", 256, 98}},
    {GgufType::kIQ1_S, {"IQ1_S", 256, 50}},
    {GgufType::kIQ4_NL, {"IQ4_NL", 32, 18}},
    {GgufType::kIQ3_S, {"IQ3_S", 256, 110}},
    {GgufType::kIQ2_S, {"IQ2_S", 256, 82}},
    {GgufType::kIQ4_XS, {"IQ4_XS", 256, 136}},
    {GgufType::kI8, {"I8", 1, 1}},
    {GgufType::kI16, {"I16", 1, 2}},
    {GgufType::kI32, {"I32", 1, 4}},
    {GgufType::kI64, {"I64", 1, 8}},
    {GgufType::kF64, {"F64", 1, 8}},
    {GgufType::kIQ1_M, {"IQ1_M", 256, 56}},
    {GgufType::kBF16, {"BF16", 1, 2}},
    {GgufType::kTQ1_0, {"TQ1_0", 256, 54}},
    {GgufType::kTQ2_0, {"TQ2_0", 256, 66}},
    {GgufType::kMXFP4, {"MXFP4", 32, 17}},
};

}  // namespace

const GgufTypeTraits* GgufTypeTraitsOf(GgufType type) {
  for (const NumberedTraits& known : kTypes) {
    if (known.type == type) return &known.traits;
  }
  return nullptr;
}

std::string GgufTypeName(GgufType type) {
  const GgufTypeTraits* traits = GgufTypeTraitsOf(type);
  return traits != nullptr ? traits->name : absl::StrCat("type ", static_cast<uint32_t>(type));
}

int64_t GgufValueBytes(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8:
    case GgufValueType::kI8:
    case GgufValueType::kBool:
      return 1;
    case GgufValueType::kU16:
    case GgufValueType::kI16:
      return 2;
    case GgufValueType::kU32:
    case GgufValueType::kI32:
    case GgufValueType::kF32:
      return 4;
    case GgufValueType::kU64:
    case GgufValueType::kI64:
    case GgufValueType::kF64:
      return 8;
    case GgufValueType::kString:
    case GgufValueType::kArray:
      return 0;
  }
  return 0;
}

std::string GgufValueTypeName(GgufValueType type) {
  static constexpr const char* kNames[] = {"U8",   "I8",     "U16",   "I16", "U32", "I32", "F32",
                                           "BOOL", "STRING", "ARRAY", "U64", "I64", "F64"};
  const uint32_t number = static_cast<uint32_t>(type);
  return number < std::size(kNames) ? kNames[number] : absl::StrCat("type ", number);
}

std::string GgufQuote(absl::string_view text) {
  constexpr size_t kLongest = 96;
  const bool cut = text.size() > kLongest;
  return absl::StrCat("'", absl::CHexEscape(text.substr(0, kLongest)), cut ? "...'" : "'");
}

}  // namespace engram
