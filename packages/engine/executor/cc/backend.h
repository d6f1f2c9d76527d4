// What executes a model behind the Node-API module: the CPU, or a GPU (packages/engine/cuda/backend_cuda.cc). One module is
// built for each; CreateBackend is the one function that tells them apart.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arena.h"
#include "step.h"

namespace kvtier {

// Of a GPU; the CPU ignores it. Types by their index in `dtypes` of packages/engine/executor/src/binding.ts.
struct GpuOptions {
  int64_t device = 0;
  int64_t compute = 2, kv = 2;
  bool graphs = true, dependent_launches = true;
  int64_t step_deadline_us = 60'000'000, copy_deadline_us = 5'000'000;
  bool capture_at_start = false;
  std::string cublaslt;        // a path; empty: the usual names; "off"
  std::string choices_folder;  // where it is kept what was measured of this machine's GPUs; empty: nowhere
  bool equal_bits = false;
  // Sizes of steps, ascending, one of which is chosen by measurement, and the pool's blocks beside each; empty: limits say it.
  std::vector<std::pair<int64_t, int64_t>> step_sizes = {};
  int64_t longest_step_us = 0;
};

// Blocks of the pool and their payloads in an arena; checked: whatever it names exists.
struct CopyJob {
  int arena_number;
  std::shared_ptr<Arena> arena;
  std::vector<int32_t> blocks;
  std::vector<int64_t> offsets;
  std::vector<uint64_t> sums;  // export: what was found; import: what is expected
  std::vector<uint8_t> good;   // import: 1 where it was found; empty, of an import with a step: it did not take place
};

// What became of an arena's memory on its way to a device.
struct ArenaPin {
  bool pinned;
  double seconds;
  std::string refusal;  // why it is not pinned
};

class Backend {
 public:
  virtual ~Backend() = default;
  // Throws std::invalid_argument naming the first thing that is wrong; a checked step cannot touch foreign memory.
  virtual void Check(const Step& step) const = 0;
  // `import`: null, or the blocks of step.import_sequence, that come in under the step. Fills its `good`; unless all are, that
  // sequence draws -1 and its new tokens' keys and values mean nothing.
  virtual StepResult Run(const Step& step, CopyJob* import) = 0;

  // Of one step: as the limits said, or as was chosen.
  virtual int64_t max_step_tokens() const = 0;
  // The KV pool: blocks 1 to blocks() - 1 may be copied, each block_bytes() long.
  virtual int64_t blocks() const = 0;
  virtual size_t block_bytes() const = 0;

  // Copies run on threads of the module that may wait, a job in pieces on several of them, beside steps: so many for each
  // direction, and how far those of exports stand back for the steps (`nice`).
  virtual int copy_threads() const = 0;
  virtual int export_niceness() const { return 0; }
  virtual size_t Pieces(const CopyJob& job) const = 0;
  virtual void Export(CopyJob& job, size_t piece) = 0;
  virtual void Import(CopyJob& job, size_t piece) = 0;

  // An arena was mapped, and will be unmapped once no copy uses it any more. Neither blocks.
  virtual void Attached(int number, const std::shared_ptr<Arena>& arena) = 0;
  virtual void Detached(int number) = 0;

  // Waits until it is known. None: nothing is pinned here.
  virtual std::optional<ArenaPin> Pinned(int) { return std::nullopt; }

  // The executor is being closed: no copy waits for a device that does not answer any more.
  virtual void Closing() = 0;

  // What was chosen and what the start took, as one line of JSON, for the log.
  virtual std::string Describe() const = 0;
};

std::unique_ptr<Backend> CreateBackend(const Shape& shape, const WeightPlan& plan, const Limits& limits, const GpuOptions& gpu);

}  // namespace kvtier
