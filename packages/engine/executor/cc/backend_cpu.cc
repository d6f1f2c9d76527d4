// The CPU behind Backend: the transformer, and copies block by block.
#ifndef KVTIER_CUDA
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "backend.h"
#include "block_copy.h"
#include "transformer.h"

namespace kvtier {
namespace {

// Steps need the same processors. A tenth of a core that is wanted by all remains, and copies a gigabyte in two seconds.
constexpr int kExportNiceness = 10;
constexpr unsigned kCopyThreads = 2;  // two streams fill the memory bus of the machines this was measured on

class CpuBackend : public Backend {
 public:
  CpuBackend(const Shape& shape, const WeightPlan& plan, const Limits& limits)
      : max_step_tokens_(limits.max_step_tokens), transformer_(shape, plan, limits) {}

  void Check(const Step& step) const override { transformer_.Check(step); }
  // Nothing to gain here from layers: a copy is over before the step begins.
  StepResult Run(const Step& step, CopyJob* import) override {
    if (import == nullptr) return transformer_.Run(step);
    import->good.resize(import->blocks.size());
    for (size_t i = 0; i < import->blocks.size(); ++i) Import(*import, i);
    StepResult result = transformer_.Run(step);
    SettleImport(step, std::ranges::count(import->good, 0) == 0, result);
    return result;
  }
  int64_t max_step_tokens() const override { return max_step_tokens_; }
  int64_t blocks() const override { return transformer_.pool().blocks; }
  size_t block_bytes() const override { return transformer_.pool().block_bytes; }
  int copy_threads() const override {
    return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, kCopyThreads));
  }
  int export_niceness() const override { return kExportNiceness; }
  size_t Pieces(const CopyJob& job) const override { return job.blocks.size(); }
  void Export(CopyJob& job, size_t i) override {
    job.sums[i] = CopyAndHash(Payload(job, i), transformer_.pool().block(job.blocks[i]), block_bytes());
  }
  void Import(CopyJob& job, size_t i) override {
    job.good[i] = CopyAndHash(transformer_.pool().block(job.blocks[i]), Payload(job, i), block_bytes()) == job.sums[i];
  }

  // A thread fills the page tables, so that first copies need not fault page by page; where none can be had, they do.
  void Attached(int number, const std::shared_ptr<Arena>& arena) override {
    std::erase_if(stopped_, [](const auto& one) { return one->ended.load(); });
    auto one = std::make_unique<Populating>();
    try {
      one->thread = std::jthread([arena, &ended = one->ended](std::stop_token stop) {
        Populate(arena->base(), arena->bytes(), stop);
        ended = true;
      });
      populating_[number] = std::move(one);
    } catch (const std::system_error&) {
      // See above.
    }
  }
  // The thread ends with the piece that it fills: it is waited for when it has.
  void Detached(int number) override {
    const auto found = populating_.find(number);
    if (found == populating_.end()) return;
    found->second->thread.request_stop();
    stopped_.push_back(std::move(found->second));
    populating_.erase(found);
  }
  void Closing() override {}
  std::string Describe() const override { return R"({"backend":"cpu"})"; }

 private:
  struct Populating {
    std::atomic<bool> ended{false};
    std::jthread thread;
  };

  static uint8_t* Payload(const CopyJob& job, size_t i) { return job.arena->base() + job.offsets[i]; }

  const int64_t max_step_tokens_;
  Transformer transformer_;
  std::map<int, std::unique_ptr<Populating>> populating_;
  std::vector<std::unique_ptr<Populating>> stopped_;  // of arenas that were left
};

}  // namespace

std::unique_ptr<Backend> CreateBackend(const Shape& shape, const WeightPlan& plan, const Limits& limits, const GpuOptions&) {
  return std::make_unique<CpuBackend>(shape, plan, limits);
}

}  // namespace kvtier
#endif
