// A GPU behind Backend: the transformer and the transfers on one device, and the arenas that are pinned for it.
//
// Invariant: a copy's call returns only when the device touches its blocks and slots no more. One that misses its deadline
// keeps its thread until then, and fails; the scheduler does not wait for it: a load's request starts anew after its own
// deadline and leaves its blocks with the load, an export holds blocks that nobody waits for.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "backend.h"
#include "json.h"
#include "model/step_size.h"
#include "transfer/transfers.h"

namespace kvtier {
namespace {

using cuda::TransferResult;

constexpr int kCopyThreads = 6;  // four channels on the bus, and some that may wait for a device that does not answer
constexpr std::chrono::milliseconds kSettlePoll(20), kBetweenSteps(5);

cuda::CudaOptions TransformerOptions(const GpuOptions& gpu) {
  cuda::CudaOptions options;
  options.device = static_cast<int>(gpu.device);
  options.compute = static_cast<NumberType>(gpu.compute);
  options.kv = static_cast<NumberType>(gpu.kv);
  options.graphs = gpu.graphs;
  options.step_deadline_us = gpu.step_deadline_us;
  options.capture_at_start = gpu.capture_at_start;
  options.dependent_launches = gpu.dependent_launches;
  options.gemm = {.cublaslt = gpu.cublaslt, .choices_folder = gpu.choices_folder, .equal_bits = gpu.equal_bits};
  return options;
}

cuda::StepSizeOptions StepSizes(const GpuOptions& gpu) {
  cuda::StepSizeOptions options;
  for (const auto& [tokens, blocks] : gpu.step_sizes) options.sizes.push_back({tokens, blocks});
  options.bounds.longest_us = static_cast<double>(gpu.longest_step_us);
  options.folder = gpu.choices_folder;
  return options;
}

class CudaBackend : public Backend {
 public:
  CudaBackend(const Shape& shape, const WeightPlan& plan, const Limits& limits, const GpuOptions& gpu)
      : device_(static_cast<int>(gpu.device)), block_layers_(shape.block_layers), kinds_(shape.kinds) {
    UseDevice();
    const auto options = TransformerOptions(gpu);
    const auto weights = cuda::LoadWeights(shape, plan, limits, options);
    choice_.limits = limits;
    if (!gpu.step_sizes.empty()) choice_ = cuda::MeasureStepSize(shape, weights, limits, options, StepSizes(gpu));
    blocks_ = choice_.limits.blocks;
    transformer_ = std::make_unique<cuda::CudaTransformer>(shape, weights, choice_.limits, options);
    cuda::TransferOptions transfer;
    transfer.device = device_;
    transfer.deadline_us = gpu.copy_deadline_us;
    transfer.pin.device = device_;
    transfer.alone = [this] { return Alone(); };
    engine_ = std::make_unique<cuda::Transfers>(
        cuda::KvBlocks{transformer_->pool(), blocks_, static_cast<int64_t>(transformer_->block_bytes())}, transfer);
  }

  ~CudaBackend() override {
    try {
      UseDevice();
      if (engine_ && !engine_->QuarantinedBlocks().empty()) gpu::Abandon();  // a copy hangs: nothing here may wait for the device
    } catch (const std::exception&) {
      gpu::Abandon();
    }
    for (auto& [number, hold] : arenas_) Release(*hold);
    for (auto& [number, hold] : arenas_) hold->released.wait();
    engine_.reset();
  }

  void Check(const Step& step) const override { transformer_->Check(step); }
  // The step's kernels for a layer wait, on the device, for that layer of all blocks; checksums are there when both have ended.
  StepResult Run(const Step& step, CopyJob* import) override {
    UseDevice();
    const StepUnderWay under_way(*this);
    if (import == nullptr) return transformer_->Run(step);
    const auto arriving = BeginImport(*import);
    StepResult result = transformer_->Run(step, [&](int64_t layer, gpu::Stream& stream) {
      if (arriving) arriving->BeforeLayer(kinds_[static_cast<size_t>(layer)].slot, stream);
    });
    if (arriving) {
      const TransferResult& end = arriving->Finish();
      // The device still writes to the blocks: they are nobody's until this process ends.
      if (end.outcome == TransferResult::Outcome::kTimedOut) throw std::runtime_error("GPU: import with a step: " + end.error);
      if (end.outcome == TransferResult::Outcome::kDone) import->good = arriving->good();
    }
    SettleImport(step, !import->good.empty() && std::ranges::count(import->good, 0) == 0, result);
    return result;
  }
  int64_t max_step_tokens() const override { return choice_.limits.max_step_tokens; }
  int64_t blocks() const override { return blocks_; }
  size_t block_bytes() const override { return transformer_->block_bytes(); }
  int copy_threads() const override { return kCopyThreads; }
  size_t Pieces(const CopyJob&) const override { return 1; }  // transfers cut it into batches

  void Export(CopyJob& job, size_t) override {
    const int arena = RegisteredArena(job);
    Settle(engine_->Export(arena, job.blocks, job.offsets, job.sums), "export");
  }
  void Import(CopyJob& job, size_t) override {
    const int arena = RegisteredArena(job);
    Settle(engine_->Import(arena, job.blocks, job.offsets, job.sums, job.good), "import");
  }

  // Pinning walks every page of the arena: not on JavaScript's thread.
  void Attached(int number, const std::shared_ptr<Arena>& arena) override {
    auto hold = std::make_unique<ArenaHold>();
    hold->arena = arena;
    hold->registered = std::async(std::launch::async, [this, &hold = *hold] {
                         UseDevice();
                         return engine_->Register(hold.arena->base(), hold.arena->bytes(), [&] { return !hold.left && !closing_; });
                       }).share();
    std::lock_guard lock(mutex_);
    std::erase_if(arenas_, [](const auto& entry) { return entry.second->Gone(); });
    arenas_[number] = std::move(hold);
  }

  void Detached(int number) override {
    std::lock_guard lock(mutex_);
    Release(*arenas_.at(number));
  }

  std::optional<ArenaPin> Pinned(int number) override {
    const auto found = Registered(number);
    return ArenaPin{found.pinned, found.seconds, found.refusal};
  }

  void Closing() override { closing_ = true; }

  std::string Describe() const override {
    UseDevice();
    const auto info = gpu::Info();
    const auto& times = transformer_->start_times();
    std::ostringstream out;
    out << R"({"backend":"cuda","device":)" << cuda::Quoted(info.name) << R"(,"computeCapability":)" << info.compute_capability
        << R"(,"emulated":)" << (info.emulated ? "true" : "false") << R"(,"gemm":)" << cuda::Quoted(transformer_->gemm_name())
        << R"(,"weightsUs":)" << static_cast<int64_t>(times.weights_us) << R"(,"buffersUs":)" << static_cast<int64_t>(times.buffers_us)
        << R"(,"graphsUs":)" << static_cast<int64_t>(times.graphs_us) << R"(,"stepTokens":)" << max_step_tokens() << R"(,"stepSizeBy":")"
        << (choice_.times.empty() ? "setting" : choice_.measured ? "measurement" : "kept measurement") << '"';
    if (!choice_.times.empty()) DescribeSteps(out);
    out << "}";
    return out.str();
  }

 private:
  // Of one arena, until it was let go. Its tasks find the arena here: a future keeps what its task captured, and would keep it mapped.
  struct ArenaHold {
    std::shared_ptr<Arena> arena;   // null: let go
    std::atomic<bool> left{false};  // nobody wants it pinned any more
    std::shared_future<cuda::Transfers::Registration> registered;
    std::future<void> released;  // valid: it was left

    // The end of a future waits for its task: only what has ended is forgotten on JavaScript's thread.
    bool Gone() const { return released.valid() && released.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  };

  // What was measured, for people: microseconds a token of a prompt, and of its longest step.
  void DescribeSteps(std::ostringstream& out) const {
    out << R"(,"stepPromptTokens":)" << choice_.prompt << R"(,"stepMeasuringUs":)" << static_cast<int64_t>(choice_.measuring_us);
    if (choice_.taken_bytes > 0) {
      out << R"(,"stepTrialBytes":)" << choice_.taken_bytes << R"(,"stepTrialReckonedBytes":)" << choice_.reckoned_bytes;
    }
    out << R"(,"stepTimes":[)";
    for (const cuda::StepTime& time : choice_.times) {
      out << (&time == choice_.times.data() ? "" : ",") << R"({"tokens":)" << time.tokens << R"(,"usPerToken":)" << time.PerToken()
          << R"(,"longestUs":)" << std::max(time.first_us, time.last_us) << "}";
    }
    out << "]";
  }

  // Told to transfers: whether no step runs, nor is likely to within the next milliseconds. Decodes follow each other closer than that.
  class StepUnderWay {
   public:
    explicit StepUnderWay(CudaBackend& backend) : backend_(backend) { backend.stepping_ = true; }
    ~StepUnderWay() {
      backend_.last_step_ = std::chrono::steady_clock::now();
      backend_.stepping_ = false;
    }
    StepUnderWay(const StepUnderWay&) = delete;
    StepUnderWay& operator=(const StepUnderWay&) = delete;

   private:
    CudaBackend& backend_;
  };
  bool Alone() const { return !stepping_ && std::chrono::steady_clock::now() - last_step_.load() > kBetweenSteps; }

  // The runtime's current device is a matter of each thread.
  void UseDevice() const {
    static thread_local int used = -1;
    if (used == device_) return;
    gpu::Use(device_);
    used = device_;
  }

  // Null where a step would have to wait for the arena to be pinned.
  std::unique_ptr<cuda::LayeredImport> BeginImport(const CopyJob& job) {
    std::shared_future<cuda::Transfers::Registration> registered;
    {
      std::lock_guard lock(mutex_);
      registered = arenas_.at(job.arena_number)->registered;
    }
    if (registered.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return nullptr;
    return engine_->ImportByLayer(registered.get().arena, job.blocks, job.offsets, job.sums, block_layers_);
  }

  int RegisteredArena(const CopyJob& job) { return Registered(job.arena_number).arena; }

  // Waits for it.
  cuda::Transfers::Registration Registered(int number) {
    UseDevice();
    std::shared_future<cuda::Transfers::Registration> registered;
    {
      std::lock_guard lock(mutex_);
      registered = arenas_.at(number)->registered;
    }
    return registered.get();
  }

  // Unpins and unmaps, on a thread of its own. Memory that the device may still reach stays mapped, for ever if need be.
  void Release(ArenaHold& hold) {
    hold.left = true;
    if (hold.released.valid()) return;
    hold.released = std::async(std::launch::async, [this, &hold] {
      bool free = false;
      try {
        UseDevice();
        free = engine_->Unregister(hold.registered.get().arena);
      } catch (const std::exception&) {  // it was never registered, or the device is gone: the process will end
      }
      const auto arena = std::move(hold.arena);
      if (!free) new std::shared_ptr<Arena>(arena);
    });
  }

  void Settle(const TransferResult& result, const char* what) {
    if (result.outcome == TransferResult::Outcome::kDone) return;
    if (result.outcome == TransferResult::Outcome::kTimedOut) {
      while (!closing_ && !engine_->Settled(result.ticket)) std::this_thread::sleep_for(kSettlePoll);
    }
    const bool busy = result.outcome == TransferResult::Outcome::kRefused;
    throw std::runtime_error(std::string(busy ? "BUSY: " : "GPU: ") + what + ": " + result.error);
  }

  const int device_;
  const int64_t block_layers_;
  cuda::StepChoice choice_;
  int64_t blocks_ = 0;
  const std::vector<LayerKind> kinds_;
  std::unique_ptr<cuda::CudaTransformer> transformer_;
  std::unique_ptr<cuda::Transfers> engine_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<ArenaHold>> arenas_;
  std::atomic<bool> closing_{false}, stepping_{false};
  std::atomic<std::chrono::steady_clock::time_point> last_step_{};
};

}  // namespace

std::unique_ptr<Backend> CreateBackend(const Shape& shape, const WeightPlan& plan, const Limits& limits, const GpuOptions& gpu) {
  return std::make_unique<CudaBackend>(shape, plan, limits, gpu);
}

}  // namespace kvtier
