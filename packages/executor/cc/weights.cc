#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "model.h"

namespace kvtier {
namespace {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info {};
    if (fd < 0 || fstat(fd, &info) != 0) {
      const std::string why = strerror(errno);
      if (fd >= 0) close(fd);
      throw std::runtime_error("MODEL: " + path + ": cannot be opened: " + why);
    }
    bytes_ = static_cast<size_t>(info.st_size);
    base_ = bytes_ == 0 ? MAP_FAILED : mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (base_ == MAP_FAILED) throw std::runtime_error("MODEL: " + path + ": cannot be mapped");
    madvise(base_, bytes_, MADV_WILLNEED);
  }
  MappedFile(MappedFile&& other) noexcept : base_(other.base_), bytes_(other.bytes_) { other.base_ = MAP_FAILED; }
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile() {
    if (base_ != MAP_FAILED) munmap(base_, bytes_);
  }
  const uint8_t* data() const { return static_cast<const uint8_t*>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  void* base_ = MAP_FAILED;
  size_t bytes_ = 0;
};

void Convert(float* target, const uint8_t* source, uint64_t count, Dtype dtype) {
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
}

uint64_t ElementBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

struct Job {
  uint64_t target;  // element index in the weights' memory
  TensorRef source;
  float offset;  // added to each element
};

}  // namespace

Weights LoadWeights(const WeightPlan& plan, float norm_offset, ThreadPool& pool) {
  std::vector<MappedFile> files;
  for (const auto& path : plan.files) files.emplace_back(path);

  constexpr uint64_t kNone = ~0ull;
  constexpr uint64_t kPiece = 1 << 20;
  uint64_t total = 0;
  std::vector<Job> jobs;
  const auto place = [&](const TensorStack& stack, float offset = 0) {
    if (stack.empty()) return kNone;
    const uint64_t start = total;
    for (const auto& ref : stack) {
      const auto& file = files.at(static_cast<size_t>(ref.file));
      const uint64_t bytes = ref.count * ElementBytes(ref.dtype);
      if (ref.offset > file.bytes() || bytes > file.bytes() - ref.offset) {
        throw std::runtime_error("MODEL: " + plan.files[static_cast<size_t>(ref.file)] + ": a tensor ends past the file");
      }
      for (uint64_t done = 0; done < ref.count; done += kPiece) {
        const uint64_t count = std::min(kPiece, ref.count - done);
        jobs.push_back({total + done, {ref.file, ref.offset + done * ElementBytes(ref.dtype), count, ref.dtype}, offset});
      }
      total += ref.count;
    }
    total = (total + 15) & ~15ull;  // every matrix starts on a cache line
    return start;
  };

  struct Placed {
    uint64_t at[12];
  };
  const uint64_t embedding = place(plan.embedding);
  const uint64_t norm = place(plan.norm, norm_offset);
  const uint64_t lm_head = place(plan.lm_head);
  std::vector<Placed> placed;
  for (const auto& l : plan.layers) {
    const auto norm_of = [&](const TensorStack& stack) { return place(stack, norm_offset); };
    placed.push_back({{norm_of(l.input_norm), place(l.qkv), place(l.qkv_bias), norm_of(l.q_norm), norm_of(l.k_norm),
                       place(l.o), place(l.o_bias), norm_of(l.attention_out_norm), norm_of(l.post_norm),
                       place(l.gate_up), place(l.down), norm_of(l.mlp_out_norm)}});
  }

  Weights weights{};
  weights.memory = Memory(total * sizeof(float), "the model's weights");
  float* base = weights.memory.floats();
  pool.For(static_cast<int64_t>(jobs.size()), [&](int64_t task, int) {
    const auto& [target, source, offset] = jobs[static_cast<size_t>(task)];
    Convert(base + target, files[static_cast<size_t>(source.file)].data() + source.offset, source.count, source.dtype);
    if (offset != 0) {
      for (uint64_t i = 0; i < source.count; ++i) base[target + i] += offset;
    }
  });

  const auto at = [&](uint64_t start) -> const float* { return start == kNone ? nullptr : base + start; };
  weights.embedding = at(embedding);
  weights.norm = at(norm);
  weights.lm_head = lm_head == kNone ? weights.embedding : at(lm_head);
  for (const auto& p : placed) {
    weights.layers.push_back({at(p.at[0]), at(p.at[1]), at(p.at[2]), at(p.at[3]), at(p.at[4]), at(p.at[5]), at(p.at[6]),
                              at(p.at[7]), at(p.at[8]), at(p.at[9]), at(p.at[10]), at(p.at[11])});
  }
  return weights;
}

}  // namespace kvtier
