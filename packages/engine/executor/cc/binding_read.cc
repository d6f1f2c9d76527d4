// What crosses the Node-API boundary at the opening of a model, as structs: packages/engine/executor/src/binding.ts has the same names.
#include "binding.h"

namespace kvtier {
namespace {

int64_t Int(const Napi::Object& object, const char* name) { return object.Get(name).ToNumber().Int64Value(); }

float Float(const Napi::Object& object, const char* name) { return object.Get(name).ToNumber().FloatValue(); }

TensorStack Stack(const Napi::Object& object, const char* name) {
  TensorStack stack;
  const auto refs = object.Get(name).As<Napi::Array>();
  for (uint32_t i = 0; i < refs.Length(); ++i) {
    const auto ref = refs.Get(i).As<Napi::Object>();
    stack.push_back({static_cast<int>(Int(ref, "file")), static_cast<uint64_t>(Int(ref, "offset")),
                     static_cast<uint64_t>(Int(ref, "count")), static_cast<Dtype>(Int(ref, "dtype"))});
  }
  return stack;
}

}  // namespace

Shape ReadShape(const Napi::Object& o) {
  Shape shape{Int(o, "vocabSize"), Int(o, "hiddenSize"), Int(o, "intermediateSize"), Int(o, "layers"), Int(o, "heads"),
              Int(o, "kvHeads"), Int(o, "headDim"), Int(o, "maxModelTokens"), Float(o, "rmsEps"),
              Float(o, "normOffset"), Float(o, "attentionScale"), Float(o, "embeddingScale"), Float(o, "logitCap"),
              o.Get("gelu").ToBoolean(), {}, {}, Int(o, "groups"), Int(o, "blockLayers"), {}};
  const auto ropes = o.Get("ropes").As<Napi::Array>();
  for (uint32_t i = 0; i < ropes.Length(); ++i) {
    const auto rope = ropes.Get(i).As<Napi::Object>();
    const auto freqs = rope.Get("freqs").As<Napi::Float32Array>();
    shape.ropes.push_back({{freqs.Data(), freqs.Data() + freqs.ElementLength()}, Float(rope, "scale")});
  }
  const auto kinds = o.Get("layerKinds").As<Napi::Array>();
  shape.group_windows.resize(static_cast<size_t>(shape.groups));
  for (uint32_t i = 0; i < kinds.Length(); ++i) {
    const auto kind = kinds.Get(i).As<Napi::Object>();
    shape.kinds.push_back({Int(kind, "windowTokens"), Int(kind, "rope"), Int(kind, "group"), Int(kind, "slot")});
    shape.group_windows.at(static_cast<size_t>(shape.kinds.back().group)) = shape.kinds.back().window;
  }
  return shape;
}

Limits ReadLimits(const Napi::Object& o) {
  return {Int(o, "blockTokens"), Int(o, "blockCount"), Int(o, "threads"), Int(o, "maxStepTokens"), Int(o, "maxStepSequences")};
}

WeightPlan ReadPlan(const Napi::Object& o) {
  WeightPlan plan;
  const auto files = o.Get("files").As<Napi::Array>();
  for (uint32_t i = 0; i < files.Length(); ++i) {
    const auto file = files.Get(i).As<Napi::Object>();
    plan.files.push_back({file.Get("path").ToString(), static_cast<int>(Int(file, "fd"))});
  }
  plan.embedding = Stack(o, "embedding");
  plan.norm = Stack(o, "norm");
  plan.lm_head = Stack(o, "lmHead");
  const auto layers = o.Get("layers").As<Napi::Array>();
  for (uint32_t i = 0; i < layers.Length(); ++i) {
    const auto l = layers.Get(i).As<Napi::Object>();
    plan.layers.push_back({Stack(l, "inputNorm"), Stack(l, "qkv"), Stack(l, "qkvBias"), Stack(l, "qNorm"),
                           Stack(l, "kNorm"), Stack(l, "o"), Stack(l, "oBias"), Stack(l, "attentionOutNorm"),
                           Stack(l, "postNorm"), Stack(l, "gateUp"), Stack(l, "down"), Stack(l, "mlpOutNorm")});
  }
  return plan;
}

GpuOptions ReadGpu(const Napi::Value& value) {
  GpuOptions options;
  if (!value.IsObject()) return options;
  const auto o = value.As<Napi::Object>();
  options = {Int(o, "device"), Int(o, "compute"), Int(o, "kv"), o.Get("graphs").ToBoolean(), o.Get("dependentLaunches").ToBoolean(),
          Int(o, "stepDeadlineUs"), Int(o, "copyDeadlineUs"), o.Get("captureAtStart").ToBoolean(), o.Get("cublaslt").ToString(), o.Get("choicesFolder").ToString(), o.Get("equalBits").ToBoolean(), {}, Int(o, "longestStepUs")};
  const auto sizes = o.Get("stepSizes").As<Napi::Array>();
  for (uint32_t i = 0; i < sizes.Length(); ++i) {
    const auto size = sizes.Get(i).As<Napi::Object>();
    options.step_sizes.emplace_back(Int(size, "tokens"), Int(size, "blocks"));
  }
  return options;
}

}  // namespace kvtier
