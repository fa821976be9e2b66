#include "client/bench/expected_reply.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace engram::bench {
namespace {

using client::Form;

// How far two gates may be apart whose keys are 2 bf16 roundings apart: dot, a mean of products around 1, moves by up
// to 2^-7; where it is near 0 the gate is 1 / (1 + exp(-sqrt|dot|)) with a sign, whose two sides are then up to 2 *
// sqrt(2^-7) / 4 = 0.044 apart.
constexpr double kGateTolerance = 1.0 / 16;

enum class Element { kByte, kBf16, kF32 };

int64_t WidthOf(Element element) { return element == Element::kByte ? 1 : element == Element::kBf16 ? 2 : 4; }

double ValueAt(const char* bytes, Element element, int64_t index) {
  if (element == Element::kByte) return static_cast<unsigned char>(bytes[index]);
  uint32_t word = 0;
  if (element == Element::kBf16) {
    uint16_t half = 0;
    std::memcpy(&half, bytes + 2 * index, sizeof half);
    word = uint32_t{half} << 16;
  } else {
    std::memcpy(&word, bytes + 4 * index, sizeof word);
  }
  float value = 0;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// One tensor of a layer, [tokens] of `width` elements.
struct Tensor {
  absl::string_view name;
  Element element = Element::kByte;
  const std::string* got = nullptr;
  const std::string* expected = nullptr;
};

class Comparison {
 public:
  Comparison(const ReplyRules& rules, const Step& step) : rules_(rules), model_(*rules.model), step_(step) {}

  std::string Layer(size_t index, const ExpectedLayer& expected, const v1::LayerOutput& got) {
    if (got.layer_id() != expected.layer_id) {
      return absl::StrCat("layers[", index, "] is layer ", got.layer_id(), ", expected ", expected.layer_id);
    }
    const std::string none;
    const Form form = step_.form;
    const bool rows = form == Form::kRowsNative || form == Form::kRowsBf16;
    const Element highway = rules_.dtype == client::HighwayDtype::kBf16 ? Element::kBf16 : Element::kF32;
    const Tensor tensors[] = {
        {"highway", highway, &got.highway(), form == Form::kHighway ? &expected.out : &none},
        {"kv", Element::kBf16, &got.kv(), form == Form::kKv ? &expected.out : &none},
        {"gates", Element::kF32, &got.gates(), &expected.gates},
        {"value", Element::kBf16, &got.value(), &expected.value},
        {"rows", form == Form::kRowsNative ? Element::kByte : Element::kBf16, &got.rows(),
         rows ? &expected.out : &none},
    };
    for (const Tensor& tensor : tensors) {
      if (tensor.got->size() != tensor.expected->size()) {
        return absl::StrCat("layer ", expected.layer_id, ": ", tensor.name, " has ", tensor.got->size(),
                            " bytes, expected ", tensor.expected->size());
      }
      const int64_t element = Compare(index, expected, tensor);
      if (element >= 0) return Describe(expected.layer_id, tensor, element);
    }
    return "";
  }

 private:
  // The first wrong element; -1: none.
  int64_t Compare(size_t layer, const ExpectedLayer& expected, const Tensor& tensor) const {
    if (*tensor.got == *tensor.expected) return -1;
    const auto elements = static_cast<int64_t>(tensor.got->size()) / WidthOf(tensor.element);
    const bool exact = rules_.same_numerics || tensor.name == "rows";
    for (int64_t i = 0; i < elements; ++i) {
      const int64_t width = WidthOf(tensor.element);
      if (std::memcmp(tensor.got->data() + i * width, tensor.expected->data() + i * width,
                      static_cast<size_t>(width)) == 0) {
        continue;
      }
      if (exact) return i;
      const double off = std::abs(ValueAt(tensor.got->data(), tensor.element, i) -
                                  ValueAt(tensor.expected->data(), tensor.element, i));
      if (!(off <= Tolerance(layer, expected, tensor, i))) return i;  // NaN is wrong too
    }
    return -1;
  }

  double Tolerance(size_t layer, const ExpectedLayer& expected, const Tensor& tensor, int64_t i) const {
    const int64_t dim = model_.dim;
    const int64_t copies = model_.hc;
    if (tensor.name == "gates") return kGateTolerance;
    if (tensor.name == "kv") return KvTolerance(expected.kv, i);
    // Where a token's value begins in kv: behind its keys.
    const auto value_at = [&](int64_t token, int64_t d) { return (token * (copies + 1) + copies) * dim + d; };
    if (tensor.name == "value") return KvTolerance(expected.kv, value_at(i / dim, i % dim));
    const int64_t v = value_at(i / (copies * dim), i % dim);
    const double value = std::abs(ValueAt(expected.kv.data(), Element::kBf16, v));
    const double h = std::abs(ValueAt(rules_.highways[layer], tensor.element, i));
    const double rounding =
        tensor.element == Element::kBf16 ? 0x1p-7 * std::abs(ValueAt(tensor.expected->data(), tensor.element, i)) : 0;
    return 0x1p-19 * (h + value) + kGateTolerance * value + KvTolerance(expected.kv, v) + rounding;
  }

  // Of kv value i: two bf16 roundings of it, or of the rms of its key copy or value where terms cancel.
  double KvTolerance(const std::string& kv, int64_t i) const {
    const int64_t dim = model_.dim;
    double squares = 0;
    for (int64_t d = i / dim * dim; d < i / dim * dim + dim; ++d) {
      const double value = ValueAt(kv.data(), Element::kBf16, d);
      squares += value * value;
    }
    const double rms = std::sqrt(squares / static_cast<double>(dim));
    return 2 * std::max(0x1p-7 * std::abs(ValueAt(kv.data(), Element::kBf16, i)), 0x1p-8 * rms);
  }

  std::string Describe(int32_t layer_id, const Tensor& tensor, int64_t element) const {
    const int64_t elements = static_cast<int64_t>(tensor.got->size()) / WidthOf(tensor.element) / step_.tokens();
    int64_t token = element / elements;
    size_t number = 0;
    while (token >= static_cast<int64_t>(step_.sequences[number].token_ids.size())) {
      token -= static_cast<int64_t>(step_.sequences[number++].token_ids.size());
    }
    const StepSequence& sequence = step_.sequences[number];
    const std::string who = sequence.session.empty()
                                ? absl::StrCat("sequences[", number, "]")
                                : absl::StrCat("session \"", absl::CEscape(sequence.session), "\"");
    return absl::StrFormat("%s, position %d, layer %d: %s[%d] of the token is %.9g, expected %.9g", who,
                           sequence.start_pos + token, layer_id, tensor.name, element % elements,
                           ValueAt(tensor.got->data(), tensor.element, element),
                           ValueAt(tensor.expected->data(), tensor.element, element));
  }

  const ReplyRules& rules_;
  const client::ModelInfo& model_;
  const Step& step_;
};

}  // namespace

std::string FirstMismatch(const ReplyRules& rules, const Step& step, const std::vector<ExpectedLayer>& expected,
                          const google::protobuf::RepeatedPtrField<v1::LayerOutput>& reply) {
  if (static_cast<size_t>(reply.size()) != expected.size()) {
    return absl::StrCat("the reply has ", reply.size(), " layers, expected ", expected.size());
  }
  Comparison comparison(rules, step);
  for (size_t i = 0; i < expected.size(); ++i) {
    std::string mismatch = comparison.Layer(i, expected[i], reply[static_cast<int>(i)]);
    if (!mismatch.empty()) return mismatch;
  }
  return "";
}

}  // namespace engram::bench
