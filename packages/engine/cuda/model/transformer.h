// The forward pass on a GPU: the contract of packages/engine/executor/cc/transformer.h, whose math this is. Owns the weights, the
// KV pool and all scratch, sized once at start. A step's inputs go up by one kernel, only token ids come back, and
// neither by a copy engine: a step waits for no import and no export. Batches of decodes alone run as graphs, one per padded batch size.
//
// Invariants: after an error of the GPU (a fault, a step past its deadline) nothing runs any more, the process has to end;
// what a hung kernel may still write to is never freed. Results do not depend on whether a graph ran.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "../kernels/kernels.h"
#include "../gemm/gemm.h"
#include "device_weights.h"
#include "step.h"

namespace kvtier::cuda {

struct CudaOptions {
  int device = 0;
  NumberType compute = NumberType::kBf16;  // weights and activations: f32, f16 or bf16
  NumberType kv = NumberType::kBf16;       // keys and values: the same, or e4m3
  bool graphs = true;
  bool dependent_launches = true;  // in graphs: a kernel begins before the one before it has ended; sm_90 and newer
  bool capture_at_start = false;  // all graphs; else each at its first use
  GemmOptions gemm;
  int64_t step_deadline_us = 60'000'000;
};

// Where the start's time went.
struct StartTimes {
  double weights_us = 0, buffers_us = 0, graphs_us = 0;
};

class CudaTransformer {
 public:
  CudaTransformer(Shape shape, const WeightPlan& plan, const Limits& limits, const CudaOptions& options);
  // With weights that exist already, of type options.compute, on the same device.
  CudaTransformer(Shape shape, std::shared_ptr<const DeviceWeights> weights, const Limits& limits, const CudaOptions& options);
  ~CudaTransformer();
  CudaTransformer(const CudaTransformer&) = delete;
  CudaTransformer& operator=(const CudaTransformer&) = delete;

  // As Transformer::Check.
  void Check(const Step& step) const { CheckStep(step, shape_, limits_); }

  // Before layer `layer` is computed: may make the stream wait, for the layer's blocks to arrive.
  using BeforeLayer = std::function<void(int64_t layer, Stream& stream)>;
  // One step at a time, from any thread; the step has passed Check. With `before_layer` no graph is used. Throws "GPU: ..."
  // when the step does not end by its deadline.
  StepResult Run(const Step& step, const BeforeLayer& before_layer = {});

  // Device memory: `blocks` blocks, one contiguous as [layer][K,V][kv head][token][head dim] of options.kv.
  uint8_t* pool() const;
  uint8_t* block(int64_t id) const { return pool() + static_cast<size_t>(id) * block_bytes_; }
  size_t block_bytes() const { return block_bytes_; }
  const Shape& shape() const { return shape_; }
  const Limits& limits() const { return limits_; }
  const CudaOptions& options() const { return options_; }
  const StartTimes& start_times() const { return times_; }
  // cuBLASLt or not, for the log.
  const std::string& gemm_name() const;
  int64_t graphs() const;

 private:
  struct State;

  const Shape shape_;
  const Limits limits_;
  const CudaOptions options_;
  const size_t block_bytes_;
  StartTimes times_;
  std::unique_ptr<State> state_;
  bool broken_ = false;
};

// The weights of a model that is served: what cannot be is refused before they are loaded.
std::shared_ptr<const DeviceWeights> LoadWeights(const Shape& shape, const WeightPlan& plan, const Limits& limits, const CudaOptions& options);
// Bytes of device memory beside weights and KV blocks: what the step's bounds and its kernels need.
size_t StepBytes(const Shape& shape, const Limits& limits, const CudaOptions& options, int multiprocessors);
// Bytes of one block of the pool.
size_t KvBlockBytes(const Shape& shape, int64_t block_tokens, NumberType kv);

}  // namespace kvtier::cuda
