#include "transformer.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <stdexcept>

#include "../kernels/attention.h"
#include "forward.h"
#include "step_inputs.h"

namespace kvtier::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kScratchBlocks = 1;
constexpr int64_t kEndDeadlineUs = 5'000'000;  // nothing runs any more, unless the device hangs

double ElapsedUs(Clock::time_point since) { return std::chrono::duration<double, std::micro>(Clock::now() - since).count(); }

// Graphs are captured for these numbers of sequences: 1, 2, 4, then multiples of 8; the last is the most a step may have.
int64_t PaddedSequences(int64_t sequences, int64_t most) {
  const int64_t padded = sequences <= 2 ? sequences : sequences <= 4 ? 4 : (sequences + 7) / 8 * 8;
  return std::min(padded, most);
}

PagedKv Pages(const Shape& shape, const Limits& limits, const CudaOptions& options, void* pool) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  return {pool, static_cast<int64_t>(KvBlockBytes(shape, limits.block_tokens, options.kv)), 0,
          narrow(limits.blocks + kScratchBlocks), narrow(limits.block_tokens), narrow(shape.kv_heads), narrow(shape.head_dim), options.kv};
}

GemmOptions Products(const CudaOptions& options) {
  GemmOptions products = options.gemm;
  products.dependent_launches = options.dependent_launches;
  return products;
}

// What the kernels cannot do is refused before anything is loaded, and not by the first request.
void RequireServed(const Shape& shape, const Limits& limits, const CudaOptions& options) {
  if (options.kv != options.compute && options.kv != NumberType::kE4m3) {
    throw std::invalid_argument("CONFIG: the KV cache is of the type that is computed in, or fp8 (e4m3)");
  }
  const size_t shared_bytes = gpu::Info().shared_bytes_per_block;
  if (options.compute != NumberType::kF32 && shape.head_dim > 128 && shared_bytes < kWideHeadsSharedBytes) {
    throw std::invalid_argument("CONFIG: heads of " + std::to_string(shape.head_dim) + " take " + std::to_string(kWideHeadsSharedBytes) +
                                " bytes of a thread block's shared memory, this GPU grants " + std::to_string(shared_bytes) +
                                "; serve the model on one of compute capability 8.0, 9.0 or 10.0");
  }
  Batch one{};
  one.sequences = one.rows = 1;
  AttentionArgs args{};
  args.q_stride = shape.qkv_columns();
  args.heads = static_cast<int32_t>(shape.heads);
  args.scale = shape.attention_scale;
  args.kv = Pages(shape, limits, options, nullptr);
  CheckAttention(options.compute, args, one);
}

// State of a device that hangs or has failed: kept for as long as the process lives, since the device may still use it.
template <class T>
void Abandon(std::unique_ptr<T> state) {
  gpu::Abandon();
  static std::vector<T*>& abandoned = *new std::vector<T*>;
  abandoned.push_back(state.release());
}

}  // namespace

std::shared_ptr<const DeviceWeights> LoadWeights(const Shape& shape, const WeightPlan& plan, const Limits& limits, const CudaOptions& options) {
  gpu::Use(options.device);
  RequireServed(shape, limits, options);
  ThreadPool threads(static_cast<int>(limits.threads));
  return std::make_shared<const DeviceWeights>(LoadDeviceWeights(plan, shape.norm_offset, options.compute, threads));
}

size_t KvBlockBytes(const Shape& shape, int64_t block_tokens, NumberType kv) {
  return static_cast<size_t>(shape.block_layers * 2 * shape.kv_heads * block_tokens * shape.head_dim * NumberBytes(kv));
}

size_t StepBytes(const Shape& shape, const Limits& limits, const CudaOptions& options, int multiprocessors) {
  return Forward::ScratchBytes(shape, limits, options.compute, multiprocessors) + StepInputs::DeviceBytes(shape, limits) +
         CublasLt::kWorkspaceBytes;
}

// All that is on the device. The wait comes last: the stream has ended before what its kernels use is freed.
struct CudaTransformer::State {
  State(const Shape& shape, std::shared_ptr<const DeviceWeights> loaded, const Limits& limits, const CudaOptions& options)
      : weights(std::move(loaded)),
        pool(KvBlockBytes(shape, limits.block_tokens, options.kv) * static_cast<size_t>(limits.blocks + kScratchBlocks), "the KV cache"),
        inputs(shape, limits, static_cast<int32_t>(limits.blocks), gpu::Info().multiprocessors, options.gemm.equal_bits),
        forward(shape, limits, *weights, Pages(shape, limits, options, pool.data()), Products(options), gpu::Info().multiprocessors),
        dependent_launches(options.dependent_launches) {}

  const std::shared_ptr<const DeviceWeights> weights;
  gpu::Buffer pool;
  StepInputs inputs;
  Forward forward;
  const bool dependent_launches;
  std::map<int64_t, gpu::Graph> graphs;  // by padded number of sequences
  gpu::PinnedBuffer logits;              // as much as was ever asked for
  Stream stream{Stream::Priority::kHigh};
  gpu::WaitAtEnd ending{stream, kEndDeadlineUs};

  // One query per sequence. A size that comes for the first time runs as it is, so that all its kernels are loaded, and is
  // captured behind that.
  StepInputs::Sent RunDecodes(const Step& step, int64_t padded, bool graph, const BeforeLayer& before_layer) {
    const StepInputs::Sent sent = inputs.SendDecodes(stream, step, padded);
    const auto capturable = graph ? inputs.ForCapture(sent) : std::nullopt;
    if (const auto captured = graphs.find(padded); capturable && captured != graphs.end()) {
      stream.Launch(captured->second);
      return sent;
    }
    forward.Run(stream, sent, before_layer);
    if (capturable) {
      stream.BeginCapture(dependent_launches);
      forward.Run(stream, *capturable, {});
      graphs.emplace(padded, stream.EndCapture());
    }
    return sent;
  }

  // Steps of padding alone. False when one does not end by its deadline.
  bool CaptureAll(int64_t most, int64_t deadline_us) {
    const Step nobody{{}, {}, {}, {}, 1, {}, {}, false};
    for (int64_t padded = 1; graphs.empty() || graphs.rbegin()->first < most; padded = PaddedSequences(padded + 1, most)) {
      RunDecodes(nobody, padded, true, {});
      if (!stream.Synchronize(deadline_us)) return false;
    }
    return true;
  }
};

CudaTransformer::CudaTransformer(Shape shape, const WeightPlan& plan, const Limits& limits, const CudaOptions& options)
    : CudaTransformer(shape, LoadWeights(shape, plan, limits, options), limits, options) {}

CudaTransformer::CudaTransformer(Shape shape, std::shared_ptr<const DeviceWeights> weights, const Limits& limits, const CudaOptions& options)
    : shape_(std::move(shape)), limits_(limits), options_(options), block_bytes_(KvBlockBytes(shape_, limits.block_tokens, options.kv)) {
  gpu::Use(options_.device);
  RequireServed(shape_, limits_, options_);
  times_.weights_us = weights->elapsed_us;
  auto start = Clock::now();
  state_ = std::make_unique<State>(shape_, std::move(weights), limits_, options_);
  times_.buffers_us = ElapsedUs(start);
  if (options_.graphs && options_.capture_at_start) {
    start = Clock::now();
    if (!state_->CaptureAll(limits_.max_step_sequences, options_.step_deadline_us)) {
      Abandon(std::move(state_));
      throw std::runtime_error("GPU: the first steps did not end within their deadline; restart the worker");
    }
    times_.graphs_us = ElapsedUs(start);
  }
}

CudaTransformer::~CudaTransformer() {
  try {
    gpu::Use(options_.device);  // whose thread this is, nobody knows
  } catch (const std::exception&) {
    broken_ = true;
  }
  if (broken_) Abandon(std::move(state_));
}

uint8_t* CudaTransformer::pool() const { return state_->pool.data(); }
const std::string& CudaTransformer::gemm_name() const { return state_->forward.gemm().name(); }
int64_t CudaTransformer::graphs() const { return static_cast<int64_t>(state_->graphs.size()); }

StepResult CudaTransformer::Run(const Step& step, const BeforeLayer& before_layer) {
  const auto start = Clock::now();
  if (broken_) throw std::runtime_error("GPU: the device has failed before; restart the worker");
  broken_ = true;  // until all has ended well
  gpu::Use(options_.device);
  State& state = *state_;
  Stream& stream = state.stream;
  const auto sequences = static_cast<int64_t>(step.query_tokens.size());
  const bool decodes = std::all_of(step.query_tokens.begin(), step.query_tokens.end(), [](int32_t queries) { return queries == 1; });

  StepInputs::Sent sent;
  if (decodes) {
    const int64_t padded = PaddedSequences(sequences, limits_.max_step_sequences);
    sent = state.RunDecodes(step, padded, options_.graphs && !before_layer, before_layer);
  } else {
    sent = state.inputs.Send(stream, step);
    state.forward.Run(stream, sent, before_layer);
  }
  // Which row of the logits each sampled sequence has.
  std::vector<std::pair<int64_t, int64_t>> sampled;
  for (int64_t i = 0, row = 0; i < sequences; ++i) {
    if (step.sample[static_cast<size_t>(i)] != 0) sampled.emplace_back(i, decodes ? i : row++);
  }
  StepResult result;
  const size_t vocab = static_cast<size_t>(shape_.vocab);
  if (step.want_logits && !sampled.empty()) {
    const size_t bytes = sampled.size() * vocab * sizeof(float);
    if (state.logits.bytes() < bytes) state.logits = gpu::PinnedBuffer(bytes, "logits");
    for (size_t i = 0; i < sampled.size(); ++i) {
      stream.Copy(state.logits.data<float>() + i * vocab, state.forward.logits() + static_cast<size_t>(sampled[i].second) * vocab, vocab * sizeof(float));
    }
  }
  if (!stream.Synchronize(options_.step_deadline_us)) {
    gpu::Abandon();
    throw std::runtime_error("GPU: a step of " + std::to_string(step.token_ids.size()) + " tokens did not end within " +
                             std::to_string(options_.step_deadline_us / 1000) + " ms; restart the worker");
  }
  broken_ = false;

  result.token_ids.assign(static_cast<size_t>(sequences), -1);
  for (const auto& [sequence, row] : sampled) result.token_ids[static_cast<size_t>(sequence)] = state.forward.token_ids()[row];
  if (step.want_logits) result.logits.assign(state.logits.data<float>(), state.logits.data<float>() + sampled.size() * vocab);
  result.elapsed_us = ElapsedUs(start);
  return result;
}

}  // namespace kvtier::cuda
