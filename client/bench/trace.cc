#include "client/bench/trace.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/bench/load_options.h"
#include "nlohmann/json.hpp"

namespace engram::bench {
namespace {

using nlohmann::json;

// Far beyond what anybody records, and far below what arithmetic takes.
constexpr size_t kMostFileBytes = size_t{1} << 30;
constexpr size_t kMostLineBytes = size_t{1} << 20;
constexpr int64_t kMostTokens = int64_t{1} << 24;
constexpr int64_t kMostPosition = int64_t{1} << 40;
constexpr size_t kMostNameBytes = 64;
constexpr double kMostMillis = 1e9;  // 11 days

class LineParser {
 public:
  LineParser(const std::string& file, size_t line) : where_(absl::StrCat(file, ":", line, ": ")) {}

  absl::StatusOr<TraceStep> Parse(absl::string_view text, int64_t previous_at) {
    if (text.size() > kMostLineBytes) return Wrong("the line", absl::StrCat(text.size(), " bytes"), "at most 1 MiB");
    const json object = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
    if (!object.is_object()) return Wrong("the line", "no JSON object", "{\"sequences\": [...]}");
    TraceStep step;
    step.at = previous_at;
    for (const auto& [key, value] : object.items()) {
      absl::Status status;
      if (key == "at_ms") {
        status = At(value, previous_at, &step.at);
      } else if (key == "form") {
        status = FormOf(value, &step.form);
      } else if (key == "sequences") {
        status = Sequences(value, &step.sequences);
      } else {
        status = Wrong(Shown(json(key)), "no key of a step", "at_ms, form, sequences");
      }
      if (!status.ok()) return status;
    }
    if (step.sequences.empty()) return Wrong("sequences", "missing", "at least one");
    return step;
  }

 private:
  // A value as JSON writes it, short and fit for a terminal.
  static std::string Shown(const json& value) {
    std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 60) + "...";
    return text;
  }

  absl::Status Wrong(absl::string_view what, absl::string_view is, absl::string_view expected) const {
    return absl::InvalidArgumentError(absl::StrCat(where_, what, " is ", is, ", expected ", expected));
  }

  absl::Status At(const json& value, int64_t previous, int64_t* at) const {
    const double ms = value.is_number() ? value.get<double>() : -1;
    if (!(ms >= 0 && ms <= kMostMillis)) return Wrong("at_ms", Shown(value), "milliseconds in [0, 1e9]");
    *at = static_cast<int64_t>(std::llround(ms * 1e6));
    if (*at >= previous) return absl::OkStatus();
    return Wrong("at_ms", Shown(value),
                 absl::StrCat("no less than the step before's, ", static_cast<double>(previous) / 1e6));
  }

  absl::Status FormOf(const json& value, std::optional<client::Form>* form) const {
    if (!value.is_string()) return Wrong("form", Shown(value), "a form's name");
    const auto forms = ParseForms(value.get<std::string>());
    if (!forms.ok() || forms->size() != 1) {
      return Wrong("form", Shown(value), "highway, kv, update, gate, rows-native or rows-bf16");
    }
    *form = forms->front();
    return absl::OkStatus();
  }

  absl::Status Integer(const std::string& what, const json& value, int64_t low, int64_t high, int64_t* out) const {
    // Unsigned numbers beyond int64 would be cast to negative ones.
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(high));
    if (fits && value.get<int64_t>() >= low && value.get<int64_t>() <= high) {
      *out = value.get<int64_t>();
      return absl::OkStatus();
    }
    return Wrong(what, Shown(value), absl::StrCat("an integer in [", low, ", ", high, "]"));
  }

  absl::Status Sequences(const json& value, std::vector<TraceSequence>* sequences) const {
    if (!value.is_array() || value.empty()) return Wrong("sequences", Shown(value), "a list of at least one");
    std::set<std::string> names;
    int64_t tokens = 0;
    for (size_t i = 0; i < value.size(); ++i) {
      const std::string path = absl::StrCat("sequences[", i, "]");
      TraceSequence sequence;
      if (absl::Status status = Sequence(path, value[i], &sequence); !status.ok()) return status;
      if (!names.insert(sequence.session).second) {
        return Wrong(path + ".session", Shown(value[i]["session"]), "each name once a step");
      }
      tokens += sequence.tokens;
      if (tokens > kMostTokens) {
        return Wrong("the sum of tokens", absl::StrCat("over ", kMostTokens), absl::StrCat("at most ", kMostTokens));
      }
      sequences->push_back(std::move(sequence));
    }
    return absl::OkStatus();
  }

  absl::Status Sequence(const std::string& path, const json& value, TraceSequence* sequence) const {
    if (!value.is_object()) return Wrong(path, Shown(value), "an object");
    for (const auto& [key, field] : value.items()) {
      const std::string at = absl::StrCat(path, ".", key);
      absl::Status status;
      if (key == "session") {
        if (field.is_string()) sequence->session = field.get<std::string>();
        if (!field.is_string() || sequence->session.empty() || sequence->session.size() > kMostNameBytes) {
          status = Wrong(at, Shown(field), absl::StrCat("a name of 1 to ", kMostNameBytes, " bytes"));
        }
      } else if (key == "start_pos") {
        status = Integer(at, field, 0, kMostPosition, &sequence->start_pos);
      } else if (key == "tokens") {
        status = Integer(at, field, 1, kMostTokens, &sequence->tokens);
      } else if (key == "ngram_pool") {
        status = Integer(at, field, 0, kMostPosition, &sequence->ngram_pool);
      } else {
        status = Wrong(absl::StrCat(path, ": ", Shown(json(key))), "no key of a sequence",
                       "session, start_pos, tokens, ngram_pool");
      }
      if (!status.ok()) return status;
    }
    if (sequence->session.empty()) return Wrong(path + ".session", "missing", "a name");
    if (sequence->tokens == 0) return Wrong(path + ".tokens", "missing", "how many");
    return absl::OkStatus();
  }

  const std::string where_;
};

}  // namespace

int64_t TraceStep::tokens() const {
  int64_t sum = 0;
  for (const TraceSequence& sequence : sequences) sum += sequence.tokens;
  return sum;
}

absl::StatusOr<std::vector<TraceStep>> ParseTrace(const std::string& name, absl::string_view text) {
  std::vector<TraceStep> steps;
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    absl::StatusOr<TraceStep> step = LineParser(name, number).Parse(line, steps.empty() ? 0 : steps.back().at);
    if (!step.ok()) return step.status();
    step->line = number;
    steps.push_back(*std::move(step));
  }
  if (steps.empty())
    return absl::InvalidArgumentError(absl::StrCat(name, ": holds no step, expected a JSON object a line"));
  return steps;
}

absl::StatusOr<std::vector<TraceStep>> ReadTrace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("--trace ", path, ": ", std::strerror(errno)));
  std::string text;
  char buffer[65536];
  while (file.read(buffer, sizeof buffer) || file.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(file.gcount()));
    if (text.size() > kMostFileBytes) {
      return absl::InvalidArgumentError(absl::StrCat("--trace ", path, ": has more than 1 GiB"));
    }
  }
  if (file.bad()) return absl::UnavailableError(absl::StrCat("--trace ", path, ": cannot be read"));
  return ParseTrace(path, text);
}

std::string TraceLine(const TraceStep& step) {
  nlohmann::ordered_json line;
  line["at_ms"] = static_cast<double>(step.at) / 1e6;
  if (step.form.has_value()) line["form"] = client::FormName(*step.form);
  for (const TraceSequence& sequence : step.sequences) {
    nlohmann::ordered_json one = {
        {"session", sequence.session}, {"start_pos", sequence.start_pos}, {"tokens", sequence.tokens}};
    if (sequence.ngram_pool > 0) one["ngram_pool"] = sequence.ngram_pool;
    line["sequences"].push_back(std::move(one));
  }
  return line.dump();
}

absl::Status CheckTrace(const std::string& name, const std::vector<TraceStep>& steps, client::Form form,
                        client::HighwayDtype dtype, int64_t layers, const client::ModelInfo& model) {
  for (const TraceStep& step : steps) {
    const std::string where = absl::StrCat(name, ":", step.line, ": ");
    if (absl::Status status = CheckCallSize(step.form.value_or(form), dtype, step.tokens(), layers, model);
        !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(where, status.message()));
    }
    for (const TraceSequence& sequence : step.sequences) {
      if (sequence.start_pos + sequence.tokens <= model.limits.position_limit) continue;
      return absl::InvalidArgumentError(absl::StrCat(where, sequence.tokens, " tokens from position ",
                                                     sequence.start_pos, " pass the server's position limit of ",
                                                     model.limits.position_limit));
    }
  }
  return absl::OkStatus();
}

TraceSource::TraceSource(const client::ModelInfo& model, const std::vector<TraceStep>& steps, client::Form form,
                         uint64_t seed, int64_t highway_starts)
    : steps_(steps),
      form_(form),
      seed_(seed),
      vocab_(model.vocab),
      lookback_(model.lookback_length()),
      highway_starts_(highway_starts) {}

void TraceSource::Next(size_t, Step* step) {
  const uint64_t call = next_.fetch_add(1, std::memory_order_relaxed);
  const TraceStep& from = steps_[call % steps_.size()];
  step->form = from.form.value_or(form_);
  step->highway_at = static_cast<int64_t>(Mix(call) % static_cast<uint64_t>(highway_starts_));
  step->sequences.resize(from.sequences.size());
  for (size_t i = 0; i < from.sequences.size(); ++i) {
    const TraceSequence& sequence = from.sequences[i];
    StepSequence& out = step->sequences[i];
    out.start_pos = sequence.start_pos;
    TokenSource(seed_, vocab_, sequence.ngram_pool)
        .Fill(MixName(sequence.session), sequence.start_pos, sequence.tokens, lookback_, &out.token_ids, &out.lookback);
  }
}

}  // namespace engram::bench
