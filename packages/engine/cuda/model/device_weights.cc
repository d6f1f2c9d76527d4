#include "device_weights.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../kernels/kernels.h"
#include "weight_files.h"

namespace kvtier::cuda {
namespace {

constexpr uint64_t kTensorBytes = 256;
constexpr uint64_t kStagingBytes = 64 << 20;
constexpr uint64_t kStagings = 2;
constexpr int64_t kCopyDeadlineUs = 60'000'000;

uint64_t Align(NumberType type) { return kTensorBytes / static_cast<uint64_t>(NumberBytes(type)); }

bool SameFormat(Dtype dtype, NumberType type) {
  return (dtype == Dtype::kF32 && type == NumberType::kF32) || (dtype == Dtype::kF16 && type == NumberType::kF16) ||
         (dtype == Dtype::kBf16 && type == NumberType::kBf16);
}

template <class T>
void Round(void* target, const float* source, uint64_t count) {
  auto* values = static_cast<T*>(target);
  for (uint64_t i = 0; i < count; ++i) values[i] = FromFloat<T>(source[i]);
}

// Elements as they lie in a file, to `target`, rounded to `type`.
void Convert(uint8_t* target, NumberType type, const uint8_t* from, uint64_t elements, Dtype dtype, float offset) {
  constexpr uint64_t kSlice = 4096;  // floats that stay in the first cache
  float floats[kSlice];
  const uint64_t bytes = static_cast<uint64_t>(NumberBytes(type));
  for (uint64_t done = 0; done < elements; done += kSlice) {
    const uint64_t count = std::min(kSlice, elements - done);
    ConvertToFloat(floats, from + done * ElementBytes(dtype), count, dtype, offset);
    switch (type) {
      case NumberType::kF32: memcpy(target + done * bytes, floats, count * bytes); break;
      case NumberType::kF16: Round<f16>(target + done * bytes, floats, count); break;
      case NumberType::kBf16: Round<bf16>(target + done * bytes, floats, count); break;
      case NumberType::kE4m3: break;  // refused by the caller
    }
  }
}

void Load(uint8_t* target, NumberType type, const WeightFile& file, const WeightPiece& piece) {
  const TensorRef& source = piece.source;
  if (SameFormat(source.dtype, type) && piece.offset == 0) {
    file.Read(source.offset, target, source.count * ElementBytes(source.dtype));
    return;
  }
  ForSlices(file, source, [&](const uint8_t* from, uint64_t first, uint64_t count) {
    Convert(target + first * static_cast<uint64_t>(NumberBytes(type)), type, from, count, source.dtype, piece.offset);
  });
}

double SinceUs(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - since).count();
}

void RequireType(NumberType type) {
  if (type == NumberType::kE4m3) throw std::invalid_argument("weights: computed in are f32, f16 and bf16");
}

DeviceWeights AtPlaces(const WeightPlaces& places, NumberType type) {
  const auto bytes = static_cast<uint64_t>(NumberBytes(type));
  DeviceWeights weights{};
  weights.type = type;
  weights.memory = gpu::Buffer(places.count * bytes, "the model's weights");
  const auto at = [&](uint64_t start) -> const void* {
    return start == WeightPlaces::kNone ? nullptr : weights.memory.data() + start * bytes;
  };
  weights.embedding = at(places.embedding);
  weights.norm = at(places.norm);
  weights.lm_head = at(places.lm_head);
  for (const auto& p : places.layers) {
    weights.layers.push_back({at(p.input_norm), at(p.qkv), at(p.qkv_bias), at(p.q_norm), at(p.k_norm), at(p.o), at(p.o_bias),
                              at(p.attention_out_norm), at(p.post_norm), at(p.gate_up), at(p.down), at(p.mlp_out_norm)});
  }
  return weights;
}

// A matrix of random weights: what it is multiplied with decides its scale.
struct RandomMatrix {
  uint64_t target, count;
  float scale, offset;
};

WeightPlaces PlaceRandom(const Shape& s, const WeightFeatures& f, NumberType type, std::vector<RandomMatrix>* matrices) {
  WeightPlaces places;
  const auto place = [&](bool there, int64_t outputs, int64_t inputs, float scale, float offset) {
    if (!there) return WeightPlaces::kNone;
    const uint64_t start = places.count, count = static_cast<uint64_t>(outputs * inputs);
    matrices->push_back({start, count, scale, offset});
    places.count = (start + count + Align(type) - 1) / Align(type) * Align(type);
    return start;
  };
  // Uniform numbers in [-1, 1) have a variance of 1 / 3.
  const auto matrix = [&](int64_t outputs, int64_t inputs) {
    return place(true, outputs, inputs, std::sqrt(3.0f / static_cast<float>(inputs)), 0);
  };
  const auto norm = [&](bool there, int64_t size) { return place(there, 1, size, 0.1f, 1); };
  const auto bias = [&](bool there, int64_t size) { return place(there, 1, size, 0.1f, 0); };
  places.embedding = place(true, s.vocab, s.hidden, 1, 0);
  places.norm = norm(true, s.hidden);
  places.lm_head = f.tied_embeddings ? places.embedding : matrix(s.vocab, s.hidden);
  for (int64_t l = 0; l < s.layers; ++l) {
    places.layers.push_back({norm(true, s.hidden), matrix(s.qkv_columns(), s.hidden), bias(f.qkv_bias, s.qkv_columns()),
                             norm(f.qk_norm, s.head_dim), norm(f.qk_norm, s.head_dim), matrix(s.hidden, s.q_columns()),
                             bias(f.o_bias, s.hidden), norm(f.out_norms, s.hidden), norm(true, s.hidden),
                             matrix(2 * s.intermediate, s.hidden), matrix(s.hidden, s.intermediate), norm(f.out_norms, s.hidden)});
  }
  return places;
}

}  // namespace

DeviceWeights LoadDeviceWeights(const WeightPlan& plan, float norm_offset, NumberType type, ThreadPool& pool) {
  const auto started = std::chrono::steady_clock::now();
  RequireType(type);
  const std::vector<WeightFile> files = OpenFiles(plan);
  const WeightPlaces places = PlaceWeights(plan, files, norm_offset, Align(type));
  DeviceWeights weights = AtPlaces(places, type);
  const auto bytes = static_cast<uint64_t>(NumberBytes(type));
  const auto& pieces = places.pieces;

  struct Staging {
    gpu::PinnedBuffer memory;
    gpu::Event free;
  };
  const uint64_t staging_bytes = std::min(kStagingBytes, places.count * bytes);
  std::vector<Staging> stagings;
  for (uint64_t i = 0; i < kStagings; ++i) stagings.push_back({gpu::PinnedBuffer(staging_bytes, "staging of weights"), gpu::Event()});
  gpu::Stream stream;
  const gpu::WaitAtEnd ending(stream, kCopyDeadlineUs);  // before the buffers that it copies from

  size_t turn = 0;
  FirstError error;
  for (size_t first = 0; first < pieces.size(); ++turn) {
    // As many pieces as fit, gaps of alignment between them included.
    const uint64_t start = pieces[first].target;
    size_t last = first;
    uint64_t end = start;
    while (last < pieces.size() && (pieces[last].target + pieces[last].source.count - start) * bytes <= staging_bytes) {
      end = pieces[last].target + pieces[last].source.count;
      weights.file_bytes += pieces[last].source.count * ElementBytes(pieces[last].source.dtype);
      ++last;
    }
    Staging& staging = stagings[turn % kStagings];
    if (!staging.free.Wait(kCopyDeadlineUs)) {
      gpu::Abandon();
      throw std::runtime_error("GPU: weights: a copy to the device did not end within 60 s; restart the worker");
    }
    uint8_t* memory = staging.memory.data();
    pool.For(static_cast<int64_t>(last - first), [&](int64_t task, int) {
      const WeightPiece& piece = pieces[first + static_cast<size_t>(task)];
      error.Catch([&] {
        Load(memory + (piece.target - start) * bytes, type, files[static_cast<size_t>(piece.source.file)], piece);
      });
    });
    error.Rethrow();
    stream.Copy(weights.memory.data() + start * bytes, memory, (end - start) * bytes);
    staging.free.Record(stream);
    first = last;
  }
  if (!stream.Synchronize(kCopyDeadlineUs)) {
    gpu::Abandon();
    throw std::runtime_error("GPU: weights: a copy to the device did not end within 60 s; restart the worker");
  }
  weights.elapsed_us = SinceUs(started);
  return weights;
}

DeviceWeights RandomDeviceWeights(const Shape& shape, const WeightFeatures& features, NumberType type, uint64_t seed) {
  const auto started = std::chrono::steady_clock::now();
  RequireType(type);
  std::vector<RandomMatrix> matrices;
  const WeightPlaces places = PlaceRandom(shape, features, type, &matrices);
  DeviceWeights weights = AtPlaces(places, type);
  gpu::Stream stream;
  for (const auto& m : matrices) {
    FillRandom(stream, type, weights.memory.data() + m.target * static_cast<uint64_t>(NumberBytes(type)),
               static_cast<int64_t>(m.count), seed + m.target, m.scale, m.offset);
  }
  if (!stream.Synchronize(kCopyDeadlineUs)) {
    gpu::Abandon();
    throw std::runtime_error("GPU: weights: random numbers were not made within 60 s; restart the worker");
  }
  weights.elapsed_us = SinceUs(started);
  return weights;
}

size_t DeviceWeightBytes(const Shape& shape, const WeightFeatures& features, NumberType type) {
  std::vector<RandomMatrix> matrices;
  return PlaceRandom(shape, features, type, &matrices).count * static_cast<size_t>(NumberBytes(type));
}

}  // namespace kvtier::cuda
