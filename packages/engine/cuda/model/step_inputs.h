// The arrays of a step on their way to the GPU: written into pinned memory, and fetched from there by one kernel: inputs, block tables, of
// which only the columns in use are sent, and each attention group's plan. Device addresses depend on the padded number of rows and sequences
// alone, so that captured graphs find them where they were.
//
// Invariant: padding sequences have one query at position 0 and a table of the scratch block only; their rows read and
// write nothing else. A scratch block follows the pool's last block: block 0, the null block, stays what it is to all
// others, and no block that a caller can name is touched.
#pragma once
#include <optional>
#include <span>
#include <vector>

#include "../kernels/attention_plan.h"
#include "../kernels/kernels.h"
#include "step.h"

namespace kvtier::cuda {

class StepInputs {
 public:
  // `scratch`: the block id of padding rows. `equal_bits`: prompts are attended to by large tiles only, whatever piece of them a step has.
  StepInputs(const Shape& shape, const Limits& limits, int32_t scratch, int multiprocessors, bool equal_bits);
  static size_t DeviceBytes(const Shape& shape, const Limits& limits);

  // What the kernels of a step are given; `attention`, of each group, is good until the next is sent.
  struct Sent {
    Batch batch;
    const int32_t* token_ids;    // [rows]
    const int32_t* sampled_rows; // [sampled]
    int64_t sampled;
    SamplingArgs sampling;  // [sampled]
    std::vector<AttentionWork> attention;
  };
  // Any step. The one before must have ended: its arrays are overwritten.
  Sent Send(Stream& stream, const Step& step) { return Send(stream, step, static_cast<int64_t>(step.query_tokens.size()), false); }
  // A step of one query per sequence (or of none), padded to that many sequences, of which all are sampled.
  Sent SendDecodes(Stream& stream, const Step& step, int64_t sequences) { return Send(stream, step, sequences, true); }
  // The same, as a graph's launches take it, which read the plans of whatever step they run for. Null where a plan needs several rounds:
  // so many long contexts are rare, and run as they are.
  std::optional<Sent> ForCapture(const Sent& sent) const;

 private:
  struct Layout {
    int64_t token_ids, query_start, computed, row_sequence, sampled_rows, temperature, top_k, top_p, seed, bytes;
  };
  Sent Send(Stream& stream, const Step& step, int64_t padded_sequences, bool decodes);
  static Layout Arrange(int64_t rows, int64_t sequences);
  Sent At(const Layout& layout, int64_t rows, int64_t sequences, int64_t sampled) const;
  // Plans every group's attention; a group's place on the device: the number of items of few rows, then all items.
  void Plan(Sent& sent, std::span<const int32_t> computed);
  // Rows one after another in pinned memory, of which `view` is what the GPU sees.
  void ToSend(const gpu::Buffer& target, const void* view, size_t at, int64_t target_stride, int64_t row_bytes, int64_t rows);
  template <class T>
  T* Host(int64_t offset) const { return reinterpret_cast<T*>(host_.data() + offset); }

  const int64_t groups_, block_tokens_, max_sequences_, table_stride_;
  const int32_t scratch_;
  std::vector<int32_t> queries_;         // of each sequence of the step, padding included
  std::vector<AttentionBounds> bounds_;  // [groups]
  std::vector<AttentionPlan> plans_;     // [groups]
  int64_t plan_items_;                   // what a group has room for, its count included
  gpu::PinnedBuffer host_, host_tables_, host_plans_;
  const void *host_view_, *tables_view_, *plans_view_;
  gpu::Buffer device_, device_tables_, device_plans_;
  std::vector<HostArray> arrays_;  // of the step
};

}  // namespace kvtier::cuda
