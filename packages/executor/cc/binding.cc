// The executor as a Node-API module: the functions of packages/executor/src/binding.ts, same names, same order. Arguments
// are copied here, on JavaScript's thread, and checked before a thread touches memory; every mistake is thrown.
#include "binding.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "block_copy.h"
#include "instance.h"

namespace kvtier {
namespace {

using Handle = Napi::External<std::shared_ptr<Instance>>;

std::shared_ptr<Instance> Get(const Napi::CallbackInfo& info) {
  auto instance = *info[0].As<Handle>().Data();
  if (!instance->transformer) throw Napi::Error::New(info.Env(), "the executor is closed");
  return instance;
}

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

WeightPlan ReadPlan(const Napi::Object& o) {
  WeightPlan plan;
  const auto files = o.Get("files").As<Napi::Array>();
  for (uint32_t i = 0; i < files.Length(); ++i) plan.files.push_back(files.Get(i).ToString());
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

Napi::Value Open(const Napi::CallbackInfo& info) {
  const auto limits = info[2].As<Napi::Object>();
  auto instance = Instance::Create(info.Env());
  auto work = [instance, shape = ReadShape(info[0].As<Napi::Object>()), plan = ReadPlan(info[1].As<Napi::Object>()),
               limits = Limits{Int(limits, "blockTokens"), Int(limits, "blockCount"), Int(limits, "threads"),
                               Int(limits, "maxStepTokens"), Int(limits, "maxStepSequences")}] {
    instance->transformer = std::make_unique<Transformer>(shape, plan, limits);
  };
  return instance->RunStep(info.Env(), std::move(work), [instance](Napi::Env env) -> Napi::Value {
    return Handle::New(env, new std::shared_ptr<Instance>(instance),
                       [](Napi::Env, std::shared_ptr<Instance>* data) { delete data; });
  });
}

template <class T, class Array>
std::vector<T> Copy(const Napi::Object& object, const char* name) {
  const auto array = object.Get(name).As<Array>();
  return std::vector<T>(array.Data(), array.Data() + array.ElementLength());
}

Napi::Value Execute(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  const auto o = info[1].As<Napi::Object>();
  auto step = std::make_shared<Step>();
  step->token_ids = Copy<int32_t, Napi::Int32Array>(o, "tokenIds");
  step->query_tokens = Copy<int32_t, Napi::Int32Array>(o, "queryTokens");
  step->computed_tokens = Copy<int32_t, Napi::Int32Array>(o, "computedTokens");
  step->block_tables = Copy<int32_t, Napi::Int32Array>(o, "blockTables");
  step->block_table_stride = Int(o, "blockTableStride");
  step->sample = Copy<uint8_t, Napi::Uint8Array>(o, "sample");
  step->want_logits = o.Get("wantLogits").ToBoolean();
  const auto temperature = Copy<float, Napi::Float32Array>(o, "temperature");
  const auto top_k = Copy<int32_t, Napi::Int32Array>(o, "topK");
  const auto top_p = Copy<float, Napi::Float32Array>(o, "topP");
  const auto seed = Copy<uint64_t, Napi::BigUint64Array>(o, "seed");
  if (top_k.size() != temperature.size() || top_p.size() != temperature.size() || seed.size() != temperature.size()) {
    throw Napi::Error::New(info.Env(), "step: sampling arrays of different lengths");
  }
  for (size_t i = 0; i < temperature.size(); ++i) step->sampling.push_back({temperature[i], top_k[i], top_p[i], seed[i]});
  try {
    instance->transformer->Check(*step);
  } catch (const std::exception& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
  auto result = std::make_shared<StepResult>();
  return instance->RunStep(
      info.Env(), [transformer = instance->transformer.get(), step, result] { *result = transformer->Run(*step); },
      [step, result](Napi::Env env) -> Napi::Value {
        auto answer = Napi::Object::New(env);
        auto ids = Napi::Int32Array::New(env, result->token_ids.size());
        std::copy(result->token_ids.begin(), result->token_ids.end(), ids.Data());
        answer.Set("tokenIds", ids);
        answer.Set("logits", env.Null());
        if (step->want_logits) {
          auto logits = Napi::Float32Array::New(env, result->logits.size());
          std::copy(result->logits.begin(), result->logits.end(), logits.Data());
          answer.Set("logits", logits);
        }
        answer.Set("elapsedUs", result->elapsed_us);
        return answer;
      });
}

Napi::Value AttachArena(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  bool lossless = false;
  try {
    auto arena = Arena::Open(info[1].ToString(), static_cast<uint64_t>(info[2].ToNumber().Int64Value()),
                             info[3].As<Napi::BigInt>().Uint64Value(&lossless));
    std::jthread populate([arena](std::stop_token stop) { Populate(arena->base(), arena->bytes(), stop); });
    const int number = instance->next_arena++;
    instance->arenas[number] = {std::move(arena), std::move(populate)};
    return Napi::Number::New(info.Env(), number);
  } catch (const std::runtime_error& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
}

Napi::Value DetachArena(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), Get(info)->arenas.erase(info[1].ToNumber().Int32Value()) == 1);
}

// What exports and imports have in common: which block, which payload.
struct Copies {
  std::shared_ptr<Arena> arena;
  std::vector<uint8_t*> blocks, payloads;
};

std::shared_ptr<Copies> ReadCopies(const Napi::CallbackInfo& info, const Instance& instance) {
  const auto fail = [&](const std::string& what) { return Napi::Error::New(info.Env(), "copy: " + what); };
  const auto found = instance.arenas.find(info[1].ToNumber().Int32Value());
  if (found == instance.arenas.end()) throw fail("no such arena is attached");
  const auto ids = info[2].As<Napi::Int32Array>();
  const auto offsets = info[3].As<Napi::Float64Array>();
  if (ids.ElementLength() != offsets.ElementLength()) throw fail("blockIds and offsets differ in length");
  const auto& pool = instance.transformer->pool();
  auto copies = std::make_shared<Copies>();
  copies->arena = found->second.arena;
  for (size_t i = 0; i < ids.ElementLength(); ++i) {
    if (ids[i] < 1 || ids[i] >= pool.blocks) throw fail("block id " + std::to_string(ids[i]) + " is not in the pool");
    const bool whole = offsets[i] >= 0 && offsets[i] < 0x1p53 && offsets[i] == std::floor(offsets[i]);  // no NaN
    if (!whole || !copies->arena->Contains(static_cast<uint64_t>(offsets[i]), pool.block_bytes)) {
      throw fail("offset " + std::to_string(offsets[i]) + " is not in the arena");
    }
    copies->blocks.push_back(pool.block(ids[i]));
    copies->payloads.push_back(copies->arena->base() + static_cast<uint64_t>(offsets[i]));
  }
  return copies;
}

Napi::Value ExportBlocks(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  auto copies = ReadCopies(info, *instance);
  auto sums = std::make_shared<std::vector<uint64_t>>(copies->blocks.size());
  const size_t bytes = instance->transformer->pool().block_bytes;
  return instance->RunCopies(
      info.Env(), copies->blocks.size(),
      [copies, sums, bytes](size_t i) { (*sums)[i] = CopyAndHash(copies->payloads[i], copies->blocks[i], bytes); },
      [sums](Napi::Env env) -> Napi::Value {
        auto answer = Napi::BigUint64Array::New(env, sums->size());
        std::copy(sums->begin(), sums->end(), answer.Data());
        return answer;
      });
}

Napi::Value ImportBlocks(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  auto copies = ReadCopies(info, *instance);
  const auto given = info[4].As<Napi::BigUint64Array>();
  auto sums = std::make_shared<std::vector<uint64_t>>(given.Data(), given.Data() + given.ElementLength());
  auto sorted = copies->blocks;
  std::sort(sorted.begin(), sorted.end());
  if (sums->size() != sorted.size() || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw Napi::Error::New(info.Env(), "copy: one checksum per block, and each block once");
  }
  auto good = std::make_shared<std::vector<uint8_t>>(sums->size());
  const size_t bytes = instance->transformer->pool().block_bytes;
  return instance->RunCopies(
      info.Env(), sums->size(),
      [copies, sums, good, bytes](size_t i) {
        (*good)[i] = CopyAndHash(copies->blocks[i], copies->payloads[i], bytes) == (*sums)[i];
      },
      [good](Napi::Env env) -> Napi::Value {
        auto answer = Napi::Uint8Array::New(env, good->size());
        std::copy(good->begin(), good->end(), answer.Data());
        return answer;
      });
}

Napi::Value Close(const Napi::CallbackInfo& info) {
  (*info[0].As<Handle>().Data())->Close();
  return info.Env().Undefined();
}

// Node-addon-api checks types only when asked; a wrong type must be an exception and never a crash.
bool TypedArray(const Napi::Value& value, napi_typedarray_type type) {
  return value.IsTypedArray() && value.As<Napi::TypedArray>().TypedArrayType() == type;
}

template <Napi::Value (*Function)(const Napi::CallbackInfo&), napi_typedarray_type... Types>
Napi::Value WithArrays(const Napi::CallbackInfo& info) {
  size_t index = 2;
  const bool good = info[0].IsExternal() && (TypedArray(info[index++], Types) && ...);
  if (!good) throw Napi::TypeError::New(info.Env(), "copy: arguments of the wrong type");
  return Function(info);
}

Napi::Value ExecuteChecked(const Napi::CallbackInfo& info) {
  const std::pair<const char*, napi_typedarray_type> arrays[] = {
      {"tokenIds", napi_int32_array},      {"queryTokens", napi_int32_array}, {"computedTokens", napi_int32_array},
      {"blockTables", napi_int32_array},   {"sample", napi_uint8_array},      {"temperature", napi_float32_array},
      {"topK", napi_int32_array},          {"topP", napi_float32_array},      {"seed", napi_biguint64_array}};
  if (!info[0].IsExternal() || !info[1].IsObject()) throw Napi::TypeError::New(info.Env(), "step: not an object");
  for (const auto& [name, type] : arrays) {
    if (!TypedArray(info[1].As<Napi::Object>().Get(name), type)) {
      throw Napi::TypeError::New(info.Env(), std::string("step: ") + name + " is not the typed array it should be");
    }
  }
  return Execute(info);
}

}  // namespace

void RegisterExecutor(Napi::Env env, Napi::Object exports) {
  exports.Set("open", Napi::Function::New(env, Open));
  exports.Set("execute", Napi::Function::New(env, ExecuteChecked));
  exports.Set("attachArena", Napi::Function::New(env, AttachArena));
  exports.Set("detachArena", Napi::Function::New(env, DetachArena));
  exports.Set("exportBlocks", Napi::Function::New(env, WithArrays<ExportBlocks, napi_int32_array, napi_float64_array>));
  exports.Set("importBlocks",
              Napi::Function::New(env, WithArrays<ImportBlocks, napi_int32_array, napi_float64_array, napi_biguint64_array>));
  exports.Set("close", Napi::Function::New(env, Close));
}

}  // namespace kvtier

static Napi::Object Init(Napi::Env env, Napi::Object exports) {
  kvtier::RegisterExecutor(env, exports);
  kvtier::RegisterTools(env, exports);
  return exports;
}

NODE_API_MODULE(kvtier_executor, Init)
