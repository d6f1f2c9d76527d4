// The executor as a Node-API module: the functions of packages/engine/executor/src/binding.ts, same names, same order. Arguments
// are copied here, on JavaScript's thread, and checked before a thread touches memory; every mistake is thrown.
#include "binding.h"

#include <algorithm>
#include <cmath>

#include "instance.h"
#include "no_thread.h"

namespace kvtier {
namespace {

using Handle = Napi::External<std::shared_ptr<Instance>>;

std::shared_ptr<Instance> Get(const Napi::CallbackInfo& info) {
  auto instance = *info[0].As<Handle>().Data();
  if (!instance->backend) throw Napi::Error::New(info.Env(), "the executor is closed");
  return instance;
}

Napi::Value Open(const Napi::CallbackInfo& info) {
  std::shared_ptr<Instance> instance;
  try {
    instance = Instance::Create(info.Env());
  } catch (const std::system_error& error) {  // the world's doing, like what a promise tells, and no mistake of the caller
    const auto refused = Napi::Promise::Deferred::New(info.Env());
    refused.Reject(Napi::Error::New(info.Env(), NoThread(error)).Value());
    return refused.Promise();
  }
  auto work = [instance, shape = ReadShape(info[0].As<Napi::Object>()), plan = ReadPlan(info[1].As<Napi::Object>()),
               limits = ReadLimits(info[2].As<Napi::Object>()), gpu = ReadGpu(info[3])] {
    try {
      instance->SetBackend(CreateBackend(shape, plan, limits, gpu));
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::resource_unavailable_try_again) throw;
      throw std::runtime_error(NoThread(error));
    }
  };
  return instance->RunStep(info.Env(), std::move(work), [instance](Napi::Env env) -> Napi::Value {
    return Handle::New(env, new std::shared_ptr<Instance>(instance),
                       [](Napi::Env, std::shared_ptr<Instance>* data) { delete data; });
  });
}

template <class Array, class T>
Napi::Value NewArray(Napi::Env env, const std::vector<T>& values) {
  auto array = Array::New(env, values.size());
  std::copy(values.begin(), values.end(), array.Data());
  return array;
}

template <class T, class Array>
std::vector<T> Copy(const Napi::Object& object, const char* name) {
  const auto array = object.Get(name).As<Array>();
  return std::vector<T>(array.Data(), array.Data() + array.ElementLength());
}

// Node-addon-api checks types only when asked; a wrong type must be an exception and never a crash.
bool TypedArray(const Napi::Value& value, napi_typedarray_type type) {
  return value.IsTypedArray() && value.As<Napi::TypedArray>().TypedArrayType() == type;
}

std::shared_ptr<CopyJob> ReadCopies(Napi::Env env, const Instance& instance, Napi::Value arena, Napi::Value block_ids,
                                    Napi::Value arena_offsets) {
  const auto fail = [&](const std::string& what) { return Napi::Error::New(env, "copy: " + what); };
  auto job = std::make_shared<CopyJob>();
  job->arena_number = arena.ToNumber().Int32Value();
  const auto found = instance.arenas.find(job->arena_number);
  if (found == instance.arenas.end()) throw fail("no such arena is attached");
  const auto ids = block_ids.As<Napi::Int32Array>();
  const auto offsets = arena_offsets.As<Napi::Float64Array>();
  if (ids.ElementLength() != offsets.ElementLength()) throw fail("blockIds and offsets differ in length");
  job->arena = found->second;
  for (size_t i = 0; i < ids.ElementLength(); ++i) {
    if (ids[i] < 1 || ids[i] >= instance.backend->blocks()) throw fail("block id " + std::to_string(ids[i]) + " is not in the pool");
    const bool whole = offsets[i] >= 0 && offsets[i] < 0x1p53 && offsets[i] == std::floor(offsets[i]);  // no NaN
    if (!whole || !job->arena->Contains(static_cast<uint64_t>(offsets[i]), instance.backend->block_bytes())) {
      throw fail("offset " + std::to_string(offsets[i]) + " is not in the arena");
    }
    job->blocks.push_back(ids[i]);
    job->offsets.push_back(static_cast<int64_t>(offsets[i]));
  }
  return job;
}

// The checksums are an import's.
void ReadSums(Napi::Env env, CopyJob& job, Napi::Value checksums) {
  const auto given = checksums.As<Napi::BigUint64Array>();
  job.sums.assign(given.Data(), given.Data() + given.ElementLength());
  auto sorted = job.blocks;
  std::sort(sorted.begin(), sorted.end());
  if (job.sums.size() != sorted.size() || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw Napi::Error::New(env, "copy: one checksum per block, and each block once");
  }
}

std::shared_ptr<CopyJob> ReadImport(Napi::Env env, const Instance& instance, const Napi::Object& import) {
  const auto ids = import.Get("blockIds"), offsets = import.Get("offsets"), checksums = import.Get("checksums");
  if (!TypedArray(ids, napi_int32_array) || !TypedArray(offsets, napi_float64_array) || !TypedArray(checksums, napi_biguint64_array)) {
    throw Napi::TypeError::New(env, "step: an import's blockIds, offsets and checksums are not the typed arrays they should be");
  }
  auto job = ReadCopies(env, instance, import.Get("arena"), ids, offsets);
  ReadSums(env, *job, checksums);
  return job;
}

Napi::Value Execute(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  const auto o = info[1].As<Napi::Object>();
  auto step = std::make_shared<Step>();
  step->token_ids = Copy<int32_t, Napi::Int32Array>(o, "tokenIds");
  step->query_tokens = Copy<int32_t, Napi::Int32Array>(o, "queryTokens");
  step->computed_tokens = Copy<int32_t, Napi::Int32Array>(o, "computedTokens");
  step->block_tables = Copy<int32_t, Napi::Int32Array>(o, "blockTables");
  step->block_table_stride = o.Get("blockTableStride").ToNumber().Int64Value();
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
  std::shared_ptr<CopyJob> import;
  if (const auto given = o.Get("import"); given.IsObject()) {
    import = ReadImport(info.Env(), *instance, given.As<Napi::Object>());
    step->import_sequence = std::max(0, given.As<Napi::Object>().Get("sequence").ToNumber().Int32Value());
    step->import_blocks = import->blocks;
  }
  try {
    instance->backend->Check(*step);
  } catch (const std::exception& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
  auto result = std::make_shared<StepResult>();
  return instance->RunStep(
      info.Env(), [backend = instance->backend.get(), step, import, result] { *result = backend->Run(*step, import.get()); },
      [step, import, result](Napi::Env env) -> Napi::Value {
        auto answer = Napi::Object::New(env);
        answer.Set("tokenIds", NewArray<Napi::Int32Array>(env, result->token_ids));
        answer.Set("logits", step->want_logits ? NewArray<Napi::Float32Array>(env, result->logits) : env.Null());
        answer.Set("elapsedUs", result->elapsed_us);
        if (import) answer.Set("imported", import->good.empty() ? env.Null() : NewArray<Napi::Uint8Array>(env, import->good));
        return answer;
      });
}

Napi::Value AttachArena(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  bool lossless = false;
  try {
    auto arena = Arena::Open(info[1].ToString(), static_cast<uint64_t>(info[2].ToNumber().Int64Value()),
                             info[3].As<Napi::BigInt>().Uint64Value(&lossless));
    arena = instance->UnmappedAside(std::move(arena));
    const int number = instance->next_arena++;
    instance->backend->Attached(number, arena);
    instance->arenas[number] = std::move(arena);
    return Napi::Number::New(info.Env(), number);
  } catch (const std::runtime_error& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
}

Napi::Value DetachArena(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  const int number = info[1].ToNumber().Int32Value();
  if (instance->arenas.erase(number) == 0) return Napi::Boolean::New(info.Env(), false);
  instance->backend->Detached(number);
  return Napi::Boolean::New(info.Env(), true);
}

Napi::Value ExportBlocks(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  auto job = ReadCopies(info.Env(), *instance, info[1], info[2], info[3]);
  job->sums.resize(job->blocks.size());
  return instance->RunCopies(
      info.Env(), Instance::Direction::kExport, instance->backend->Pieces(*job),
      [backend = instance->backend.get(), job](size_t piece) { backend->Export(*job, piece); },
      [job](Napi::Env env) { return NewArray<Napi::BigUint64Array>(env, job->sums); });
}

Napi::Value ImportBlocks(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  auto job = ReadCopies(info.Env(), *instance, info[1], info[2], info[3]);
  ReadSums(info.Env(), *job, info[4]);
  job->good.resize(job->blocks.size());
  return instance->RunCopies(
      info.Env(), Instance::Direction::kImport, instance->backend->Pieces(*job),
      [backend = instance->backend.get(), job](size_t piece) { backend->Import(*job, piece); },
      [job](Napi::Env env) { return NewArray<Napi::Uint8Array>(env, job->good); });
}

Napi::Value Pinned(const Napi::CallbackInfo& info) {
  auto instance = Get(info);
  const int number = info[1].ToNumber().Int32Value();
  if (!instance->arenas.contains(number)) throw Napi::Error::New(info.Env(), "pinned: no such arena is attached");
  auto report = std::make_shared<std::optional<ArenaPin>>();
  return instance->RunCopies(
      info.Env(), Instance::Direction::kExport, 1,
      [backend = instance->backend.get(), number, report](size_t) { *report = backend->Pinned(number); },
      [report](Napi::Env env) -> Napi::Value {
        if (!report->has_value()) return env.Null();
        auto answer = Napi::Object::New(env);
        answer.Set("pinned", (*report)->pinned);
        answer.Set("seconds", (*report)->seconds);
        answer.Set("refusal", (*report)->refusal);
        return answer;
      });
}

Napi::Value Bounds(const Napi::CallbackInfo& info) {
  const auto instance = Get(info);
  auto answer = Napi::Object::New(info.Env());
  answer.Set("maxStepTokens", static_cast<double>(instance->backend->max_step_tokens()));
  answer.Set("blockCount", static_cast<double>(instance->backend->blocks()));
  return answer;
}

Napi::Value Describe(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), Get(info)->backend->Describe()); }

Napi::Value Close(const Napi::CallbackInfo& info) {
  (*info[0].As<Handle>().Data())->Close();
  return info.Env().Undefined();
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
  exports.Set("pinned", Napi::Function::New(env, WithArrays<Pinned>));
  exports.Set("bounds", Napi::Function::New(env, Bounds));
  exports.Set("describe", Napi::Function::New(env, Describe));
  exports.Set("close", Napi::Function::New(env, Close));
}

}  // namespace kvtier

static Napi::Object Init(Napi::Env env, Napi::Object exports) {
  kvtier::RegisterExecutor(env, exports);
  kvtier::RegisterTools(env, exports);
#if defined(KVTIER_CUDA)
  kvtier::RegisterGpu(env, exports);
#endif
  return exports;
}

NODE_API_MODULE(kvtier_executor, Init)
