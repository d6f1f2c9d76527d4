#include "weight_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace kvtier {
namespace {

constexpr uint64_t kPieceElements = 1 << 20;

}  // namespace

WeightFile::WeightFile(const PlanFile& file) : file_(file) {
  struct stat info {};
  if (fstat(file_.fd, &info) != 0) throw std::runtime_error("MODEL: " + file_.path + ": cannot be read: " + strerror(errno));
  bytes_ = static_cast<uint64_t>(info.st_size);
  posix_fadvise(file_.fd, 0, 0, POSIX_FADV_WILLNEED);
}

void WeightFile::Read(uint64_t offset, void* target, uint64_t bytes) const {
  auto* to = static_cast<uint8_t*>(target);
  while (bytes > 0) {
    const ssize_t count = pread(file_.fd, to, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::runtime_error("MODEL: " + file_.path + ": cannot be read: " + strerror(errno));
    if (count == 0) throw std::runtime_error("MODEL: " + file_.path + ": a tensor ends past the file");
    to += count;
    offset += static_cast<uint64_t>(count);
    bytes -= static_cast<uint64_t>(count);
  }
}

std::vector<WeightFile> OpenFiles(const WeightPlan& plan) { return {plan.files.begin(), plan.files.end()}; }

WeightPlaces PlaceWeights(const WeightPlan& plan, const std::vector<WeightFile>& files, float norm_offset, uint64_t align) {
  WeightPlaces places;
  const auto place = [&](const TensorStack& stack, float offset = 0) {
    if (stack.empty()) return WeightPlaces::kNone;
    const uint64_t start = places.count;
    for (const auto& ref : stack) {
      const auto& file = files.at(static_cast<size_t>(ref.file));
      const uint64_t bytes = ref.count * ElementBytes(ref.dtype);
      if (ref.offset > file.bytes() || bytes > file.bytes() - ref.offset) {
        throw std::runtime_error("MODEL: " + plan.files[static_cast<size_t>(ref.file)].path + ": a tensor ends past the file");
      }
      for (uint64_t done = 0; done < ref.count; done += kPieceElements) {
        const uint64_t count = std::min(kPieceElements, ref.count - done);
        places.pieces.push_back(
            {places.count + done, {ref.file, ref.offset + done * ElementBytes(ref.dtype), count, ref.dtype}, offset});
      }
      places.count += ref.count;
    }
    places.count = (places.count + align - 1) / align * align;
    return start;
  };

  places.embedding = place(plan.embedding);
  places.norm = place(plan.norm, norm_offset);
  places.lm_head = plan.lm_head.empty() ? places.embedding : place(plan.lm_head);
  for (const auto& l : plan.layers) {
    const auto norm_of = [&](const TensorStack& stack) { return place(stack, norm_offset); };
    places.layers.push_back({norm_of(l.input_norm), place(l.qkv), place(l.qkv_bias), norm_of(l.q_norm), norm_of(l.k_norm),
                             place(l.o), place(l.o_bias), norm_of(l.attention_out_norm), norm_of(l.post_norm),
                             place(l.gate_up), place(l.down), norm_of(l.mlp_out_norm)});
  }
  return places;
}

void ConvertToFloat(float* target, const uint8_t* source, uint64_t count, Dtype dtype, float offset) {
  // Tensors in a file need not be aligned, so each element is read by memcpy (one plain load in machine code).
  switch (dtype) {
    case Dtype::kF32:
      memcpy(target, source, count * 4);
      break;
    case Dtype::kF16:
      for (uint64_t i = 0; i < count; ++i) {
        _Float16 value;
        memcpy(&value, source + 2 * i, 2);
        target[i] = static_cast<float>(value);
      }
      break;
    case Dtype::kBf16:
      for (uint64_t i = 0; i < count; ++i) {
        uint16_t half;
        memcpy(&half, source + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        memcpy(target + i, &bits, 4);
      }
      break;
  }
  if (offset != 0) {
    for (uint64_t i = 0; i < count; ++i) target[i] += offset;
  }
}

}  // namespace kvtier
