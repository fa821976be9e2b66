#include "server/model/gguf_writer.h"

#include <algorithm>
#include <utility>

namespace engram {
namespace {

template <typename T>
void Put(T value, std::string& out) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void PutText(absl::string_view text, std::string& out) {
  Put<uint64_t>(text.size(), out);
  out.append(text.data(), text.size());
}

int64_t Padded(int64_t bytes, int64_t alignment) {
  return alignment > 1 ? (bytes + alignment - 1) / alignment * alignment : bytes;
}

int64_t TensorBytes(const std::vector<uint64_t>& ne, GgufType type) {
  const GgufTypeTraits* traits = GgufTypeTraitsOf(type);
  if (traits == nullptr) return 0;
  uint64_t values = 1;  // wraps for shapes that lie
  for (uint64_t n : ne) values *= n;
  return static_cast<int64_t>(values / traits->block_values * traits->block_bytes);
}

}  // namespace

void GgufWriter::SetAlignment(uint32_t alignment) {
  alignment_ = alignment;
  Add<uint32_t>("general.alignment", alignment);
}

void GgufWriter::AddText(const std::string& key, absl::string_view text) {
  std::string bytes;
  PutText(text, bytes);
  AddRaw(key, GgufValueType::kString, bytes);
}

void GgufWriter::AddTexts(const std::string& key, const std::vector<std::string>& texts) {
  std::string bytes;
  for (const std::string& text : texts) PutText(text, bytes);
  AddRawArray(key, GgufValueType::kString, texts.size(), bytes);
}

void GgufWriter::AddRaw(const std::string& key, GgufValueType type, absl::string_view bytes) {
  Key entry{key, {}};
  Put<uint32_t>(static_cast<uint32_t>(type), entry.bytes);
  entry.bytes.append(bytes.data(), bytes.size());
  keys_.push_back(std::move(entry));
}

void GgufWriter::AddRawArray(const std::string& key, GgufValueType element, uint64_t count, absl::string_view bytes) {
  std::string value;
  Put<uint32_t>(static_cast<uint32_t>(element), value);
  Put<uint64_t>(count, value);
  value.append(bytes.data(), bytes.size());
  AddRaw(key, GgufValueType::kArray, value);
}

void GgufWriter::RemoveKey(const std::string& key) {
  std::erase_if(keys_, [&](const Key& entry) { return entry.name == key; });
}

void GgufWriter::AddTensor(const std::string& name, const std::vector<uint64_t>& ne, GgufType type, std::string data) {
  tensors_.push_back({name, ne, type, std::move(data), TensorBytes(ne, type)});
}

void GgufWriter::RemoveTensor(const std::string& name) {
  std::erase_if(tensors_, [&](const Tensor& tensor) { return tensor.name == name; });
}

std::vector<int64_t> GgufWriter::Layout() const {
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (const Tensor& tensor : tensors_) {
    offsets.push_back(Padded(end, alignment_));
    end = offsets.back() + tensor.bytes;
  }
  offsets.push_back(end);
  return offsets;
}

std::string GgufWriter::Header() const {
  std::string out = "GGUF";
  Put<uint32_t>(version_, out);
  Put<uint64_t>(tensor_count_.value_or(tensors_.size()), out);
  Put<uint64_t>(key_count_.value_or(keys_.size()), out);
  for (const Key& key : keys_) {
    PutText(key.name, out);
    out += key.bytes;
  }
  const std::vector<int64_t> offsets = Layout();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    PutText(tensor.name, out);
    Put<uint32_t>(static_cast<uint32_t>(tensor.ne.size()), out);
    for (uint64_t n : tensor.ne) Put<uint64_t>(n, out);
    Put<uint32_t>(static_cast<uint32_t>(tensor.type), out);
    const auto lie = offsets_.find(tensor.name);
    Put<uint64_t>(lie == offsets_.end() ? static_cast<uint64_t>(offsets[i]) : lie->second, out);
  }
  out.resize(Padded(static_cast<int64_t>(out.size()), alignment_));
  return out;
}

int64_t GgufWriter::DataOffset(const std::string& name) const {
  const std::vector<int64_t> offsets = Layout();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].name == name) return static_cast<int64_t>(Header().size()) + offsets[i];
  }
  return -1;
}

int64_t GgufWriter::FileBytes() const { return static_cast<int64_t>(Header().size()) + Layout().back(); }

std::string GgufWriter::File() const {
  std::string file = Header();
  const size_t data = file.size();
  const std::vector<int64_t> offsets = Layout();
  file.resize(data + offsets.back());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const size_t bytes = std::min(tensors_[i].data.size(), static_cast<size_t>(tensors_[i].bytes));
    std::copy_n(tensors_[i].data.data(), bytes, file.data() + data + offsets[i]);
  }
  return file;
}

}  // namespace engram
