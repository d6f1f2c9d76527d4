#include "choices.h"

#include <optional>
#include <sstream>

namespace kvtier::cuda {
namespace {

constexpr size_t kMaxChoices = 4096;
constexpr int kMaxAlgorithm = 63;

std::optional<std::pair<ProductShape, int>> Parse(const std::string& line) {
  std::istringstream fields(line);
  int type = -1, f32 = -1, choice = kMaxAlgorithm + 1;
  ProductShape shape{};
  if (!(fields >> type >> shape.rows >> shape.outputs >> shape.inputs >> f32 >> choice)) return std::nullopt;
  const bool valid = type >= 0 && type <= static_cast<int>(NumberType::kBf16) && f32 >= 0 && f32 <= 1 && choice >= kOurs &&
                     choice <= kMaxAlgorithm && shape.rows > 0 && shape.outputs > 0 && shape.inputs > 0;
  if (!valid) return std::nullopt;
  shape.type = static_cast<NumberType>(type);
  shape.target_f32 = f32 == 1;
  return std::pair{shape, choice};
}

}  // namespace

Choices::Choices(const std::string& folder, const std::string& of)
    : file_(folder, "products", of, "kvtier: which way matrix products go, 1") {
  Read();
}

void Choices::Read() {
  const auto lines = file_.Read();
  if (!lines || lines->size() > kMaxChoices) return;
  std::map<ProductShape, int> found;
  for (const std::string& line : *lines) {
    const auto one = Parse(line);
    if (!one) return;
    found.insert(*one);
  }
  for (const auto& [shape, choice] : found) choices_[shape] = choice;
}

std::vector<std::string> Choices::Lines() const {
  std::vector<std::string> lines;
  for (const auto& [s, choice] : choices_) {
    std::ostringstream line;
    line << static_cast<int>(s.type) << ' ' << s.rows << ' ' << s.outputs << ' ' << s.inputs << ' ' << (s.target_f32 ? 1 : 0) << ' ' << choice;
    lines.push_back(line.str());
  }
  return lines;
}

const int* Choices::Find(const ProductShape& shape) const {
  const auto found = choices_.find(shape);
  return found == choices_.end() ? nullptr : &found->second;
}

int Choices::Keep(const ProductShape& shape, int choice) {
  if (choices_.size() >= kMaxChoices) choices_.clear();
  file_.Change([&] {
    Read();
    choices_.emplace(shape, choice);
    return Lines();
  });
  return choices_.emplace(shape, choice).first->second;
}

}  // namespace kvtier::cuda
