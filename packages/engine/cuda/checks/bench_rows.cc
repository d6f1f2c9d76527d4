// Row kernels, RoPE and sampling at the shapes of an 8B Llama in bf16: a prefill chunk of 8,192 rows, and a decode of 32. All are
// limited by memory; the bytes are what each must read and write once.
#include "../kernels/kernels.h"
#include "bench.h"

namespace kvtier::cuda::bench {
namespace {

constexpr NumberType kRowsType = NumberType::kBf16;
constexpr int64_t kPrefill = Scaled(8192), kDecode = 32, kRowsBlockTokens = 16;
constexpr int64_t kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;

// `bytes` of device memory, every byte `value`: as bf16 numbers 0x0101 and 0x3f3f are small and ordinary.
class Filled {
 public:
  Filled(gpu::Stream& stream, int64_t bytes, uint8_t value) : buffer_(static_cast<size_t>(bytes), "a bench's tensor") {
    stream.Set(buffer_.data(), value, buffer_.bytes());
  }
  template <class T = void>
  T* data() const {
    return static_cast<T*>(static_cast<void*>(buffer_.data()));
  }

 private:
  gpu::Buffer buffer_;
};

std::string Shape(int64_t rows, int64_t columns) { return "bf16 " + std::to_string(rows) + "x" + std::to_string(columns); }

KVTIER_BENCH(rows) {
  gpu::Stream stream;
  for (const int64_t rows : {kPrefill, kDecode}) {
    const auto bytes = [&](int64_t columns) { return rows * columns * 2; };
    const Filled a(stream, bytes(kHidden), 0x3f), b(stream, bytes(kHidden), 0x3f), weight(stream, kHidden * 2, 0x3f);
    const Filled gate_up(stream, bytes(2 * kIntermediate), 0x3f), target(stream, bytes(kIntermediate), 0);
    const Filled embedding(stream, kVocab * kHidden * 2, 0x3f);
    std::vector<int32_t> spread(static_cast<size_t>(rows));
    for (size_t i = 0; i < spread.size(); ++i) spread[i] = static_cast<int32_t>(static_cast<int64_t>(i) * 7919 % kVocab);
    const Filled ids(stream, rows * 4, 0);
    stream.Copy(ids.data(), spread.data(), static_cast<size_t>(rows * 4));
    Finish(stream);

    const auto hidden_bytes = static_cast<double>(bytes(kHidden));
    ReportBytes("Embed", Shape(rows, kHidden),
                TimeUs(stream, [&] { Embed(stream, kRowsType, a.data(), embedding.data(), ids.data<int32_t>(), rows, kHidden, 1); }), 2 * hidden_bytes);
    ReportBytes("RmsNorm", Shape(rows, kHidden),
                TimeUs(stream, [&] { RmsNorm(stream, kRowsType, b.data(), a.data(), weight.data(), rows, kHidden, 1e-5f); }), 2 * hidden_bytes);
    ReportBytes("AddRmsNorm", Shape(rows, kHidden), TimeUs(stream, [&] {
                  AddRmsNorm(stream, kRowsType, b.data(), a.data(), b.data(), nullptr, weight.data(), rows, kHidden, 1e-5f);
                }),
                4 * hidden_bytes);
    ReportBytes("NormAdd", Shape(rows, kHidden),
                TimeUs(stream, [&] { NormAdd(stream, kRowsType, a.data(), b.data(), nullptr, weight.data(), rows, kHidden, 1e-5f); }),
                3 * hidden_bytes);
    ReportBytes("GatedActivation", Shape(rows, kIntermediate), TimeUs(stream, [&] {
                  GatedActivation(stream, kRowsType, target.data(), gate_up.data(), rows, kIntermediate, false);
                }),
                3 * static_cast<double>(bytes(kIntermediate)));
  }
}

KVTIER_BENCH(rope) {
  gpu::Stream stream;
  for (const int64_t rows : {kPrefill, kDecode}) {
    // One sequence of `rows` new tokens, its blocks in order.
    const int64_t blocks = rows / kRowsBlockTokens + 1, block_bytes = 2 * kKvHeads * kRowsBlockTokens * kHeadDim * 2;
    const Filled qkv(stream, rows * kQkv * 2, 0x3f), pool(stream, blocks * block_bytes, 0), freqs(stream, kHeadDim / 2 * 4, 0x3c);
    const Filled zeros(stream, rows * 4, 0), table(stream, blocks * 4, 0);
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    stream.Copy(table.data(), ids.data(), ids.size() * 4);
    Finish(stream);
    const Batch batch{1, static_cast<int32_t>(rows), zeros.data<int32_t>(), zeros.data<int32_t>(), zeros.data<int32_t>(), table.data<int32_t>(), blocks};
    const PagedKv kv{pool.data(), block_bytes, 0, static_cast<int32_t>(blocks), kRowsBlockTokens, kKvHeads, kHeadDim, kRowsType};
    const RopeArgs args{qkv.data(), nullptr, nullptr, nullptr, 1e-5f, freqs.data<float>(), 1, kHeads, kv, table.data<int32_t>()};
    ReportBytes("RopeAndStore", Shape(rows, kQkv), TimeUs(stream, [&] { RopeAndStore(stream, kRowsType, args, batch); }),
                2 * static_cast<double>(rows * kQkv * 2));
  }
}

// Greedy reads the logits once; top-k and top-p read what the weights are, too.
KVTIER_BENCH(sampling) {
  gpu::Stream stream;
  for (const int64_t rows : {int64_t{1}, kDecode}) {
    const auto count = static_cast<size_t>(rows * kVocab);
    std::vector<float> logits(count), temperature(static_cast<size_t>(rows), 0.0f), top_p(static_cast<size_t>(rows), 1.0f);
    for (size_t i = 0; i < count; ++i) logits[i] = static_cast<float>(i * 2654435761u % 100'003) * 1e-4f;
    const Filled device_logits(stream, rows * kVocab * 4, 0), settings(stream, rows * 24, 0), tokens(stream, rows * 4, 0);
    const Filled workspace(stream, SamplingWorkspaceBytes(rows, kVocab), 0);
    stream.Copy(device_logits.data(), logits.data(), count * 4);
    uint8_t* const base = settings.data<uint8_t>();
    auto* const device_seed = reinterpret_cast<uint64_t*>(base);
    auto* const device_temperature = reinterpret_cast<float*>(base + rows * 8);
    auto* const device_top_p = reinterpret_cast<float*>(base + rows * 12);
    auto* const device_top_k = reinterpret_cast<int32_t*>(base + rows * 16);
    const auto measure = [&](const char* name, float t, int32_t k, float p) {
      temperature.assign(static_cast<size_t>(rows), t);
      top_p.assign(static_cast<size_t>(rows), p);
      const std::vector<int32_t> top_k(static_cast<size_t>(rows), k);
      stream.Copy(device_temperature, temperature.data(), temperature.size() * 4);
      stream.Copy(device_top_p, top_p.data(), top_p.size() * 4);
      stream.Copy(device_top_k, top_k.data(), top_k.size() * 4);
      Finish(stream);
      const SamplingArgs args{device_temperature, device_top_k, device_top_p, device_seed};
      const double us = TimeUs(stream, [&] {
        Sample(stream, device_logits.data<float>(), rows, kVocab, 0, args, tokens.data<int32_t>(), workspace.data());
      });
      ReportBytes(std::string("Sample ") + name, std::to_string(rows) + "x" + std::to_string(kVocab), us, static_cast<double>(count * 4));
    };
    measure("greedy", 0, 0, 1);
    measure("plain", 1, 0, 1);
    measure("top-k 50 top-p 0.9", 1, 50, 0.9f);
  }
}

}  // namespace
}  // namespace kvtier::cuda::bench
