#include "client/bench/load_options.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/bench/request_composer.h"
#include "client/channels.h"

namespace engram::bench {
namespace {

using client::Form;

// Points that one run may have of a range: more was a slip.
constexpr int64_t kMostEntries = 1000;

absl::Status Wrong(absl::string_view text) { return absl::InvalidArgumentError(text); }

void AddOnce(int64_t value, std::vector<int64_t>* values) {
  if (std::find(values->begin(), values->end(), value) == values->end()) values->push_back(value);
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ParseCounts(const std::string& text, int64_t most) {
  std::vector<int64_t> counts;
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(entry, ':');
    int64_t numbers[3] = {0, 0, 1};
    bool good = parts.size() <= 3;
    for (size_t i = 0; good && i < parts.size(); ++i) {
      good = absl::SimpleAtoi(parts[i], &numbers[i]) && numbers[i] >= 1 && numbers[i] <= most;
    }
    if (int64_t step = 1; parts.size() == 3 && absl::SimpleAtoi(parts[2], &step) && step == 0) {
      return Wrong(absl::StrCat("entry \"", entry, "\" has step 0, expected at least 1"));
    }
    if (!good) {
      return Wrong(absl::StrCat("entry \"", entry, "\" is no count, expected N, FROM:TO or FROM:TO:STEP, each in [1, ",
                                most, "]"));
    }
    const int64_t to = parts.size() == 1 ? numbers[0] : numbers[1];
    if (to < numbers[0]) return Wrong(absl::StrCat("entry \"", entry, "\" ends before it begins"));
    if ((to - numbers[0]) / numbers[2] >= kMostEntries) {
      return Wrong(absl::StrCat("entry \"", entry, "\" names more than ", kMostEntries, " counts"));
    }
    for (int64_t value = numbers[0]; value <= to; value += numbers[2]) AddOnce(value, &counts);
  }
  return counts;
}

absl::StatusOr<std::vector<Form>> ParseForms(const std::string& text) {
  constexpr Form kForms[] = {Form::kHighway, Form::kKv, Form::kUpdate, Form::kGate, Form::kRowsNative, Form::kRowsBf16};
  std::vector<Form> forms;
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    const std::string name = absl::StrReplaceAll(absl::AsciiStrToLower(entry), {{"_", "-"}});
    const auto* form =
        std::find_if(std::begin(kForms), std::end(kForms), [&](Form f) { return client::FormName(f) == name; });
    if (form == std::end(kForms)) {
      return Wrong(absl::StrCat(
          "\"", entry, "\" is no form, expected ",
          absl::StrJoin(kForms, ", ", [](std::string* out, Form f) { absl::StrAppend(out, client::FormName(f)); })));
    }
    if (std::find(forms.begin(), forms.end(), *form) == forms.end()) forms.push_back(*form);
  }
  return forms;
}

absl::Status CheckLoadOptions(const LoadOptions& options) {
  for (const std::string& target : options.targets) {
    if (absl::Status status = client::CheckTarget(target); !status.ok()) {
      return Wrong(absl::StrCat("--target: ", status.message()));
    }
  }
  if (!options.echo_target.empty()) {
    if (!options.echo) return Wrong("--echo-target is given, but not --baseline echo");
    if (absl::Status status = client::CheckTarget(options.echo_target); !status.ok()) {
      return Wrong(absl::StrCat("--echo-target: ", status.message()));
    }
  }
  if (options.verify_fraction > 0 && options.model.empty()) {
    return Wrong("--verify-fraction needs --model PATH, the file to compute the expected replies from");
  }
  if (options.verify_fraction == 0 && !options.model.empty()) {
    return Wrong("--model is given, but nothing is to be verified: say --verify-fraction too");
  }
  if (options.open_loop() && options.concurrency.size() > 1) {
    return Wrong("--concurrency-range sweeps a closed loop; an open loop is bounded by --max-outstanding");
  }
  if (!options.trace.empty() && options.forms.size() > 1) {
    return Wrong("--form lists several, but the steps of --trace are replayed once, in their own forms or in one");
  }
  if (!options.trace.empty() && options.sessions > 0) {
    return Wrong("--sessions is given, but the steps of --trace are sent with look-back, without sessions");
  }
  if (options.prepare && !options.trace.empty()) {
    return Wrong("--prepare is given, but the steps of --trace are sent as they are");
  }
  if (options.prepare && options.sessions > 0) {
    return Wrong("--prepare measures calls by ticket, which no session changes: leave --sessions out");
  }
  for (const Form form : options.forms) {
    if (options.prepare && (form == Form::kRowsNative || form == Form::kRowsBf16)) {
      return Wrong(absl::StrCat("--prepare is given, but --form ", client::FormName(form),
                                " is a lookup of rows: what Prepare makes ready is kv"));
    }
  }
  for (const int64_t tokens : options.tokens_per_call) {
    if (tokens < options.sequences_per_call) {
      return Wrong(absl::StrCat("--tokens-per-call ", tokens, " is below --sequences-per-call ",
                                options.sequences_per_call, ": each sequence needs a token"));
    }
  }
  if (options.sessions > 0) {
    const int64_t callers = *std::max_element(options.concurrency.begin(), options.concurrency.end());
    if (options.sessions < callers * options.sequences_per_call) {
      return Wrong(absl::StrCat("--sessions ", options.sessions, " is below ", callers, " calls at a time of ",
                                options.sequences_per_call,
                                " sequences each: a session has one call at a time, in order"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAgainstModel(const LoadOptions& options, const client::ModelInfo& model) {
  for (const int32_t layer : options.layers) {
    if (model.HasLayer(layer)) continue;
    return Wrong(absl::StrCat("--layers: the model has no engram layer ", layer, ", it has ",
                              absl::StrJoin(model.layers, ", ", [](std::string* out, const auto& known) {
                                absl::StrAppend(out, known.layer_id);
                              })));
  }
  const auto layers = static_cast<int64_t>(options.layers.empty() ? model.layers.size() : options.layers.size());
  if (!options.trace.empty()) return absl::OkStatus();
  for (const int64_t tokens : options.tokens_per_call) {
    if (tokens / options.sequences_per_call + 1 > model.limits.position_limit) {
      return Wrong(absl::StrCat("--tokens-per-call ", tokens, " passes the server's position limit of ",
                                model.limits.position_limit));
    }
    for (const Form form : options.forms) {
      if (absl::Status status = CheckCallSize(form, options.dtype, tokens, layers, model); !status.ok()) {
        return Wrong(absl::StrCat("--tokens-per-call: ", status.message()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCallSize(Form form, client::HighwayDtype dtype, int64_t tokens, int64_t layers,
                           const client::ModelInfo& model) {
  if (tokens > model.limits.max_call_tokens) {
    return Wrong(absl::StrCat(tokens, " tokens in a call, the server takes at most ", model.limits.max_call_tokens));
  }
  int64_t token_bytes = 0;
  if (SendsHighway(form)) token_bytes = model.HighwayTokenBytes(dtype);
  if (form == Form::kKv) token_bytes = model.KvTokenBytes();
  if (form == Form::kRowsBf16) token_bytes = model.n_hash_cols * model.RowBf16Bytes();
  if (form == Form::kRowsNative) {
    for (const auto& layer : model.layers) token_bytes = std::max<int64_t>(token_bytes, layer.row_bytes);
    token_bytes *= model.n_hash_cols;
  }
  if (tokens * layers * token_bytes <= model.limits.max_message_bytes) return absl::OkStatus();
  return Wrong(absl::StrCat(tokens, " tokens of form ", client::FormName(form), " and ", layers,
                            layers == 1 ? " layer" : " layers", " make a message of ", tokens * layers * token_bytes,
                            " bytes, the server takes at most ", model.limits.max_message_bytes));
}

}  // namespace engram::bench
