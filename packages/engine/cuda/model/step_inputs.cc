#include "step_inputs.h"

#include <algorithm>

namespace kvtier::cuda {
namespace {

constexpr int64_t kInputBytes = 16;

size_t Size(int64_t count) { return static_cast<size_t>(count); }

AttentionBounds Bounds(const Shape& shape, int64_t window, int multiprocessors) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  return {narrow(shape.heads), narrow(shape.kv_heads), narrow(shape.head_dim), multiprocessors, narrow(window)};
}

int64_t MostRows(const Limits& limits) { return std::max(limits.max_step_tokens, limits.max_step_sequences); }

int64_t PlanItems(const Shape& shape, const Limits& limits) {
  return 1 + AttentionMostItems(Bounds(shape, 0, 1), MostRows(limits), limits.max_step_sequences, shape.max_tokens);
}

size_t TableBytes(const Shape& shape, const Limits& limits) {
  const int64_t stride = (shape.max_tokens + limits.block_tokens - 1) / limits.block_tokens;
  return Size(shape.groups * limits.max_step_sequences * stride) * sizeof(int32_t);
}

size_t PlanBytes(const Shape& shape, const Limits& limits) { return Size(shape.groups * PlanItems(shape, limits)) * sizeof(AttentionItem); }

}  // namespace

StepInputs::StepInputs(const Shape& shape, const Limits& limits, int32_t scratch, int multiprocessors, bool equal_bits)
    : groups_(shape.groups),
      block_tokens_(limits.block_tokens),
      max_sequences_(limits.max_step_sequences),
      table_stride_((shape.max_tokens + limits.block_tokens - 1) / limits.block_tokens),
      scratch_(scratch),
      plans_(Size(shape.groups)),
      plan_items_(PlanItems(shape, limits)) {
  for (const int64_t window : shape.group_windows) {
    bounds_.push_back(Bounds(shape, window, multiprocessors));
    if (equal_bits) bounds_.back().few_rows = 1;
  }
  const size_t bytes = Size(Arrange(MostRows(limits), limits.max_step_sequences).bytes);
  host_ = gpu::PinnedBuffer(bytes, "a step's inputs");
  device_ = gpu::Buffer(bytes, "a step's inputs");
  host_tables_ = gpu::PinnedBuffer(TableBytes(shape, limits), "a step's block tables");
  device_tables_ = gpu::Buffer(TableBytes(shape, limits), "a step's block tables");
  host_plans_ = gpu::PinnedBuffer(PlanBytes(shape, limits), "a step's attention plans");
  device_plans_ = gpu::Buffer(PlanBytes(shape, limits), "a step's attention plans");
  host_view_ = gpu::DeviceView(host_.data());
  tables_view_ = gpu::DeviceView(host_tables_.data());
  plans_view_ = gpu::DeviceView(host_plans_.data());
}

size_t StepInputs::DeviceBytes(const Shape& shape, const Limits& limits) {
  return Size(Arrange(MostRows(limits), limits.max_step_sequences).bytes) + TableBytes(shape, limits) + PlanBytes(shape, limits);
}

StepInputs::Layout StepInputs::Arrange(int64_t rows, int64_t sequences) {
  Layout layout{};
  const auto place = [&](int64_t count, int64_t bytes) {
    const int64_t at = layout.bytes;
    layout.bytes = (at + count * bytes + kInputBytes - 1) / kInputBytes * kInputBytes;
    return at;
  };
  layout.token_ids = place(rows, 4);
  layout.query_start = place(sequences + 1, 4);
  layout.computed = place(sequences, 4);
  layout.row_sequence = place(rows, 4);
  layout.sampled_rows = place(sequences, 4);
  layout.temperature = place(sequences, 4);
  layout.top_k = place(sequences, 4);
  layout.top_p = place(sequences, 4);
  layout.seed = place(sequences, 8);
  return layout;
}

StepInputs::Sent StepInputs::At(const Layout& layout, int64_t rows, int64_t sequences, int64_t sampled) const {
  const auto at = [&]<class T>(int64_t offset, T) { return reinterpret_cast<const T*>(device_.data() + offset); };
  const auto ints = [&](int64_t offset) { return at(offset, int32_t{}); };
  Batch batch{};
  batch.sequences = static_cast<int32_t>(sequences);
  batch.rows = static_cast<int32_t>(rows);
  batch.query_start = ints(layout.query_start);
  batch.computed = ints(layout.computed);
  batch.row_sequence = ints(layout.row_sequence);
  batch.tables = device_tables_.data<int32_t>();
  batch.table_stride = table_stride_;
  return {batch, ints(layout.token_ids), ints(layout.sampled_rows), sampled,
          {at(layout.temperature, float{}), ints(layout.top_k), at(layout.top_p, float{}), at(layout.seed, uint64_t{})}, {}};
}

StepInputs::Sent StepInputs::Send(Stream& stream, const Step& step, int64_t padded_sequences, bool decodes) {
  const auto real = static_cast<int64_t>(step.query_tokens.size());
  const int64_t padding = padded_sequences - real;
  const int64_t rows = static_cast<int64_t>(step.token_ids.size()) + padding;
  const Layout layout = Arrange(rows, padded_sequences);

  std::fill_n(std::copy(step.token_ids.begin(), step.token_ids.end(), Host<int32_t>(layout.token_ids)), padding, 0);
  std::fill_n(std::copy(step.computed_tokens.begin(), step.computed_tokens.end(), Host<int32_t>(layout.computed)), padding, 0);
  queries_.clear();
  int32_t* query_start = Host<int32_t>(layout.query_start);
  int32_t* row_sequence = Host<int32_t>(layout.row_sequence);
  int64_t sampled = 0, used_columns = 1;
  int32_t row = 0;
  for (int64_t i = 0; i < padded_sequences; ++i) {
    const auto at = Size(i);
    const bool pad = i >= real;
    const int32_t queries = pad ? 1 : step.query_tokens[at], computed = pad ? 0 : step.computed_tokens[at];
    query_start[i] = row;
    std::fill_n(row_sequence + row, queries, static_cast<int32_t>(i));
    row += queries;
    queries_.push_back(queries);
    used_columns = std::max<int64_t>(used_columns, (computed + queries + block_tokens_ - 1) / block_tokens_);
    if (!decodes && step.sample[at] == 0) continue;
    Host<int32_t>(layout.sampled_rows)[sampled] = row - 1;
    const Sampling sampling = pad ? Sampling{0, 0, 1, 0} : step.sampling[at];
    Host<float>(layout.temperature)[sampled] = sampling.temperature;
    Host<int32_t>(layout.top_k)[sampled] = sampling.top_k;
    Host<float>(layout.top_p)[sampled] = sampling.top_p;
    Host<uint64_t>(layout.seed)[sampled] = sampling.seed;
    ++sampled;
  }
  query_start[padded_sequences] = row;

  for (int64_t group = 0; group < groups_; ++group) {
    for (int64_t i = 0; i < padded_sequences; ++i) {
      int32_t* target = host_tables_.data<int32_t>() + (group * padded_sequences + i) * used_columns;
      if (i >= real) {
        std::fill_n(target, used_columns, scratch_);
        continue;
      }
      const int64_t columns = std::min(used_columns, step.block_table_stride);
      std::fill_n(std::copy_n(step.block_tables.data() + (group * real + i) * step.block_table_stride, columns, target),
                  used_columns - columns, 0);
    }
  }

  arrays_.clear();
  ToSend(device_, host_view_, 0, layout.bytes, layout.bytes, 1);
  ToSend(device_tables_, tables_view_, 0, table_stride_ * 4, used_columns * 4, groups_ * padded_sequences);
  Sent sent = At(layout, rows, padded_sequences, sampled);
  Plan(sent, {Host<int32_t>(layout.computed), Size(padded_sequences)});
  Upload(stream, arrays_);
  return sent;
}

void StepInputs::ToSend(const gpu::Buffer& target, const void* view, size_t at, int64_t target_stride, int64_t row_bytes, int64_t rows) {
  arrays_.push_back({target.data() + at, static_cast<const uint8_t*>(view) + at, target_stride, row_bytes, rows});
}

void StepInputs::Plan(Sent& sent, std::span<const int32_t> computed) {
  for (size_t group = 0; group < plans_.size(); ++group) {
    AttentionPlan& plan = plans_[group] = PlanAttention(bounds_[group], computed, queries_);
    const size_t at = group * Size(plan_items_), count = plan.items.size();
    AttentionItem* const host = host_plans_.data<AttentionItem>() + at;
    AttentionItem* const device = device_plans_.data<AttentionItem>() + at;
    host[0] = {};
    host[0].sequence = plan.rounds[0].few;
    std::copy(plan.items.begin(), plan.items.end(), host + 1);
    const auto bytes = static_cast<int64_t>((1 + count) * sizeof(AttentionItem));
    ToSend(device_plans_, plans_view_, at * sizeof(AttentionItem), bytes, bytes, 1);
    sent.attention.push_back({&plan, device + 1, nullptr, AttentionWorkspaceRows(bounds_[group].heads, bounds_[group].multiprocessors)});
  }
}

std::optional<StepInputs::Sent> StepInputs::ForCapture(const Sent& sent) const {
  Sent captured = sent;
  for (AttentionWork& work : captured.attention) {
    if (work.plan->rounds.size() > 1) return std::nullopt;
    work.few_count = &(work.items - 1)->sequence;
  }
  return captured;
}

}  // namespace kvtier::cuda
