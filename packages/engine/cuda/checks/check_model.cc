// Whole forward passes: every family against the CPU backend on the same weights; chunks, cached prefixes and graphs
// against a whole prefill; a device that hangs.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "../model/transformer.h"
#include "check.h"
#include "tiny_model.h"
#include "transformer.h"

namespace kvtier::cuda::check {
namespace {

constexpr Limits kLimits{.block_tokens = 8, .blocks = 128, .threads = 2, .max_step_tokens = 96, .max_step_sequences = 12};

CudaOptions Options(NumberType compute, NumberType kv, bool graphs = true) {
  CudaOptions options;
  options.compute = compute;
  options.kv = kv;
  options.graphs = graphs;
  return options;
}

std::vector<int32_t> Prompt(uint64_t seed, const Shape& shape, int64_t tokens) {
  return RandomInts(seed, tokens, 0, static_cast<int32_t>(shape.vocab) - 1);
}

// |a - b| / |b| over all numbers: what rounding to a small type does to a row of logits.
double RelativeDistance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    difference += d * d;
    size += static_cast<double>(b[i]) * b[i];
  }
  return a.size() == b.size() ? std::sqrt(difference / size) : NAN;
}

// The same steps on one or more backends, each step's answer to `see`: chunks of prefill mixed with decodes, then decodes
// alone, padded. The tokens that are appended are the first backend's.
template <class Run>
void Script(const Shape& shape, const Run& run) {
  Sequences sequences(shape, kLimits);
  const int64_t a = sequences.Add(Prompt(1, shape, 45)), b = sequences.Add(Prompt(2, shape, 7)), c = sequences.Add(Prompt(3, shape, 1));
  const auto step = [&](const std::vector<Sequences::Part>& parts) {
    const StepResult result = run(sequences.Next(parts));
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].sample) sequences.Append(parts[i].sequence, result.token_ids[i]);
    }
  };
  step({{a, 19, false}, {b, 7, true}});
  step({{b, 1, true}, {a, 25, false}, {c, 1, true}});
  step({{a, 1, true}});
  for (int i = 0; i < 9; ++i) step({{c, 1, true}, {a, 1, true}, {b, 1, true}});
  step({{c, 1, false}, {a, 1, true}});  // a chunk of one token beside a decode
}

struct Result {
  double error = 0;
  bool tokens_equal = true;
};

// All steps of the script on the CPU and on the device.
Result Compare(const Family& family, NumberType compute, NumberType kv, bool relative) {
  const TinyModel model(family, compute);
  Transformer cpu(model.shape, model.plan, kLimits);
  CudaTransformer cuda(model.shape, model.plan, kLimits, Options(compute, kv));
  Result result;
  Script(model.shape, [&](const Step& step) {
    cpu.Check(step);
    const StepResult expected = cpu.Run(step), got = cuda.Run(step);
    if (expected.logits.empty()) return expected;
    const double error = relative ? RelativeDistance(got.logits, expected.logits) : MaxError(got.logits, expected.logits);
    result.error = error > result.error || std::isnan(error) ? error : result.error;
    result.tokens_equal = result.tokens_equal && got.token_ids == expected.token_ids;
    return expected;
  });
  return result;
}

KVTIER_CHECK(model_families_f32) {
  for (const Family& family : Families()) {
    const Result result = Compare(family, kF32, kF32, false);
    Expect("CudaTransformer", std::string(family.name) + " f32, logits against the CPU", result.error, 1e-4);
    ExpectTrue("CudaTransformer", std::string(family.name) + " f32, tokens as the CPU's", result.tokens_equal);
  }
}

KVTIER_CHECK(model_families_16_bit) {
  for (const Family& family : Families()) {
    for (const auto type : {kF16, kBf16}) {
      Expect("CudaTransformer", std::string(family.name) + " " + Name(type) + ", logits against the CPU in f32",
             Compare(family, type, type, true).error, 2e-2);
    }
  }
  Expect("CudaTransformer", "llama bf16, KV e4m3", Compare(Families()[0], kBf16, kE4m3, true).error, 1e-1);
}

// Chunked prefill, and a cached prefix that ends at every block boundary, against the whole prompt in one step.
KVTIER_CHECK(model_prefixes) {
  for (const Family& family : {Families()[0], Families()[4]}) {
    for (const auto type : {kF32, kBf16}) {
      constexpr int64_t kTokens = 43;
      const TinyModel model(family, type);
      CudaTransformer cuda(model.shape, model.plan, kLimits, Options(type, type));
      const auto prompt = Prompt(9, model.shape, kTokens);
      const auto rest_after = [&](int64_t prefix) {
        Sequences sequences(model.shape, kLimits);
        const int64_t one = sequences.Add(prompt);
        if (prefix > 0) cuda.Run(sequences.Next({{one, prefix, false}}));
        return cuda.Run(sequences.Next({{one, kTokens - prefix, true}}));
      };
      const StepResult whole = rest_after(0);
      double error = 0;
      bool equal = true;
      for (int64_t prefix = kLimits.block_tokens; prefix < kTokens; prefix += kLimits.block_tokens) {
        const StepResult rest = rest_after(prefix);
        error = std::max(error, type == kF32 ? MaxError(rest.logits, whole.logits) : RelativeDistance(rest.logits, whole.logits));
        equal = equal && rest.token_ids == whole.token_ids;
      }
      const StepResult last = rest_after(kTokens - 1);  // a decode
      error = std::max(error, type == kF32 ? MaxError(last.logits, whole.logits) : RelativeDistance(last.logits, whole.logits));
      const std::string name = std::string(family.name) + " " + Name(type) + ", cached prefix at every block boundary";
      Expect("CudaTransformer", name, error, type == kF32 ? 1e-4 : 2e-2);
      if (type == kF32) ExpectTrue("CudaTransformer", name + ", the same token", equal);
    }
  }
}

// A graph computes what the launches that it was captured from compute, in every bit; also when all were captured at start.
KVTIER_CHECK(model_graphs) {
  for (const auto type : {kF32, kBf16}) {
    const TinyModel model(Families()[4], type);
    CudaTransformer eager(model.shape, model.plan, kLimits, Options(type, type, false));
    CudaTransformer lazy(model.shape, model.plan, kLimits, Options(type, type));
    CudaOptions at_start = Options(type, type);
    at_start.capture_at_start = true;
    CudaTransformer early(model.shape, model.plan, kLimits, at_start);
    bool equal = true;
    Script(model.shape, [&](const Step& step) {
      const StepResult expected = eager.Run(step);
      for (CudaTransformer* other : {&lazy, &early}) {
        const StepResult got = other->Run(step);
        equal = equal && got.logits == expected.logits && got.token_ids == expected.token_ids;
      }
      return expected;
    });
    ExpectTrue("CudaTransformer", std::string(Name(type)) + ", decode by graph as without", equal);
    ExpectTrue("CudaTransformer", std::string(Name(type)) + ", graphs are there", eager.graphs() == 0 && lazy.graphs() == 3 && early.graphs() == 5);
  }
}

// Decodes whose kernels begin before the one before them has ended give the bits of those that take turns: one sequence, some, and so many
// that they share what they read.
KVTIER_CHECK(model_dependent_launches) {
  for (const int64_t batch : {1, 3, 12}) {
    const Family& family = Families()[batch == 12 ? 0 : 4];
    const TinyModel model(family, kBf16);
    CudaOptions in_turn = Options(kBf16, kBf16);
    in_turn.dependent_launches = false;
    CudaTransformer expected(model.shape, model.plan, kLimits, in_turn), dependent(model.shape, model.plan, kLimits, Options(kBf16, kBf16));
    Sequences sequences(model.shape, kLimits);
    std::vector<Sequences::Part> parts;
    for (int64_t i = 0; i < batch; ++i) {
      parts.push_back({sequences.Add(Prompt(static_cast<uint64_t>(i), model.shape, 5 + i % 3)), 5 + i % 3, true});
    }
    bool equal = true;
    for (int step = 0; step < 5; ++step) {
      const Step one = sequences.Next(parts);
      const StepResult of = expected.Run(one), got = dependent.Run(one);
      equal = equal && of.logits == got.logits && of.token_ids == got.token_ids;
      for (size_t i = 0; i < parts.size(); ++i) {
        sequences.Append(parts[i].sequence, of.token_ids[i]);
        parts[i].tokens = 1;
      }
    }
    ExpectTrue("CudaTransformer", std::string(family.name) + " bf16, " + std::to_string(batch) + " decodes by dependent launches, the same bits",
               equal && dependent.graphs() == 1);
  }
}

// Waiting before a layer: each is announced once, in order, and what arrives then is what is computed with.
KVTIER_CHECK(model_before_layer) {
  const TinyModel model(Families()[0], kF32);
  CudaTransformer cuda(model.shape, model.plan, kLimits, Options(kF32, kF32));
  const auto prompt = Prompt(5, model.shape, 21);
  Sequences sequences(model.shape, kLimits);
  const int64_t one = sequences.Add(prompt);
  cuda.Run(sequences.Next({{one, 16, false}}));
  const Step step = sequences.Next({{one, 5, true}});
  const StepResult expected = cuda.Run(step);
  // The first block leaves the pool, and comes back layer by layer on another stream.
  gpu::PinnedBuffer saved(cuda.block_bytes(), "a block");
  uint8_t* block = cuda.block(step.block_tables[0]);
  CopyNow(saved.data(), block, cuda.block_bytes());
  gpu::Stream arrivals;
  arrivals.Set(block, 0xff, cuda.block_bytes());
  Finish(arrivals);
  std::vector<int64_t> seen;
  std::vector<gpu::Event> events(2);
  const StepResult got = cuda.Run(step, [&](int64_t layer, Stream& stream) {
    const size_t bytes = cuda.block_bytes() / 2, at = static_cast<size_t>(layer) * bytes;
    arrivals.Copy(block + at, saved.data() + at, bytes);
    events[static_cast<size_t>(layer)].Record(arrivals);
    stream.Wait(events[static_cast<size_t>(layer)]);
    seen.push_back(layer);
  });
  ExpectTrue("CudaTransformer", "layers are announced in order", seen == std::vector<int64_t>{0, 1});
  ExpectTrue("CudaTransformer", "a block that arrives layer by layer", got.logits == expected.logits);
}

// The copy engines, busy for some time: on the emulator until the end, on a GPU with gigabytes of copies.
class BusyCopyEngines {
 public:
#if defined(KVTIER_EMULATED)
  BusyCopyEngines() { gpu::HoldCopies(true); }
  ~BusyCopyEngines() { gpu::HoldCopies(false); }
  bool Still() const { return true; }
#else
  BusyCopyEngines() {
    for (int i = 0; i < 64; ++i) {
      up_.Copy(device_.data(), host_.data(), kBytes);
      down_.Copy(host_.data() + kBytes, device_.data() + kBytes, kBytes);
    }
    up_done_.Record(up_);
    down_done_.Record(down_);
  }
  ~BusyCopyEngines() {
    Finish(up_);
    Finish(down_);
  }
  bool Still() const { return !up_done_.Done() && !down_done_.Done(); }

 private:
  static constexpr size_t kBytes = 128 << 20;
  gpu::PinnedBuffer host_{2 * kBytes, "what keeps copy engines busy"};
  gpu::Buffer device_{2 * kBytes, "what keeps copy engines busy"};
  gpu::Stream up_, down_;
  gpu::Event up_done_, down_done_;
#endif
};

// Exports and imports keep the copy engines busy for as long as a decode takes: no step waits for them.
KVTIER_CHECK(model_beside_copies) {
  const TinyModel model(Families()[0], kF32);
  CudaOptions options = Options(kF32, kF32);
  options.step_deadline_us = 5'000'000;
  CudaTransformer cuda(model.shape, model.plan, kLimits, options);
  Sequences sequences(model.shape, kLimits);
  const int64_t one = sequences.Add(Prompt(5, model.shape, 21));
  const Step prefill = sequences.Next({{one, 21, true}}, false);
  const int32_t first = cuda.Run(prefill).token_ids[0];
  sequences.Append(one, first);
  const Step decode = sequences.Next({{one, 1, true}}, false);
  const int32_t second = cuda.Run(decode).token_ids[0];  // captured behind it
  const BusyCopyEngines busy;
  const int32_t prefill_beside = cuda.Run(prefill).token_ids[0], decode_beside = cuda.Run(decode).token_ids[0];
  ExpectTrue("CudaTransformer", "a step waits for no copy engine", busy.Still());
  ExpectTrue("CudaTransformer", "the same tokens beside copies", prefill_beside == first && decode_beside == second);
}

template <class Run>
std::string ErrorOf(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

KVTIER_CHECK(model_refusals) {
  const TinyModel model(Families()[0], kF32);
  Limits limits = kLimits;
  limits.block_tokens = 12;
  ExpectTrue("CudaTransformer", "blocks that the kernels cannot read", ErrorOf([&] {
               CudaTransformer(model.shape, model.plan, limits, Options(kF32, kF32));
             }) == "GPU: attention: blocks of 12 tokens; take a multiple of 8");
  ExpectTrue("CudaTransformer", "KV of another type", ErrorOf([&] {
               CudaTransformer(model.shape, model.plan, kLimits, Options(kF32, kBf16));
             }).starts_with("CONFIG: the KV cache is of the type that is computed in"));
  WeightPlan plan = model.plan;
  plan.norm[0].offset = 1 << 30;
  ExpectTrue("CudaTransformer", "a tensor outside of its file", ErrorOf([&] {
               CudaTransformer(model.shape, plan, kLimits, Options(kF32, kF32));
             }).ends_with("a tensor ends past the file"));
}

// What the GPU has no room for is refused before anything is loaded.
KVTIER_CHECK(model_wide_heads) {
  Family family = Families()[0];
  family.head_dim = 256;
  const TinyModel model(family, kBf16);
  const size_t granted = gpu::Info().shared_bytes_per_block;
  const std::string said = ErrorOf([&] { CudaTransformer(model.shape, model.plan, kLimits, Options(kBf16, kBf16)); });
  ExpectTrue("CudaTransformer", "heads of 256",
             granted >= kWideHeadsSharedBytes
                 ? said == "no error"
                 : said.starts_with("CONFIG: heads of 256 take 131072 bytes of a thread block's shared memory, this GPU grants " + std::to_string(granted)));
}

#if defined(KVTIER_EMULATED)
// The last check of this file: the device that hangs stays so until the fault is taken back.
KVTIER_CHECK(model_hang) {
  const TinyModel model(Families()[0], kF32);
  CudaOptions options = Options(kF32, kF32);
  options.step_deadline_us = 50'000;
  auto cuda = std::make_unique<CudaTransformer>(model.shape, model.plan, kLimits, options);
  Sequences sequences(model.shape, kLimits);
  const int64_t one = sequences.Add(Prompt(5, model.shape, 9));
  const Step step = sequences.Next({{one, 9, true}});
  gpu::Inject(gpu::Fault::kHang);
  const std::string first = ErrorOf([&] { cuda->Run(step); }), second = ErrorOf([&] { cuda->Run(step); });
  cuda.reset();  // while it hangs: nothing of it may wait for the device
  gpu::Inject(gpu::Fault::kNone);
  ExpectTrue("CudaTransformer", "a hung kernel ends in an error", first == "GPU: a step of 9 tokens did not end within 50 ms; restart the worker");
  ExpectTrue("CudaTransformer", "nothing runs after it", second == "GPU: the device has failed before; restart the worker");
}
#endif

}  // namespace
}  // namespace kvtier::cuda::check
