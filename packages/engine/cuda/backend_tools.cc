// What JavaScript asks of the GPU before a model is opened: is there one, what is free, what a step will take. Functions of
// packages/engine/executor/src/binding.ts.
#include "binding.h"
#include "model/transformer.h"

namespace kvtier {
namespace {

// Never throws for a machine without a GPU: `why` says what is missing.
Napi::Value Status(const Napi::CallbackInfo& info) {
  const auto env = info.Env();
  auto answer = Napi::Object::New(env);
  std::string why;
  const int count = gpu::DeviceCount(&why);
  answer.Set("count", count);
  answer.Set("why", why);
  const int device = info[0].ToNumber().Int32Value();
  if (count == 0) return answer;
  try {
    gpu::Use(device);
    const auto found = gpu::Info();
    answer.Set("name", found.name);
    answer.Set("computeCapability", found.compute_capability);
    answer.Set("multiprocessors", found.multiprocessors);
    answer.Set("totalBytes", static_cast<double>(found.total_bytes));
    answer.Set("freeBytes", static_cast<double>(found.free_bytes));
  } catch (const std::exception& error) {
    throw Napi::Error::New(env, error.what());
  }
  return answer;
}

// Bytes of device memory that steps of these bounds take, beside weights and KV blocks.
Napi::Value StepBytes(const Napi::CallbackInfo& info) {
  const auto limits = ReadLimits(info[1].As<Napi::Object>());
  const auto gpu_options = ReadGpu(info[2]);
  cuda::CudaOptions options;
  options.device = static_cast<int>(gpu_options.device);
  options.compute = static_cast<NumberType>(gpu_options.compute);
  options.kv = static_cast<NumberType>(gpu_options.kv);
  try {
    gpu::Use(options.device);
    const auto bytes = cuda::StepBytes(ReadShape(info[0].As<Napi::Object>()), limits, options, gpu::Info().multiprocessors);
    return Napi::Number::New(info.Env(), static_cast<double>(bytes));
  } catch (const std::exception& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
}

#if defined(KVTIER_EMULATED)
// "none", "hang", "illegal", "memory": see gpu.h.
Napi::Value Inject(const Napi::CallbackInfo& info) {
  const std::string name = info[0].ToString();
  gpu::Inject(name == "hang"      ? gpu::Fault::kHang
              : name == "illegal" ? gpu::Fault::kIllegalAccess
              : name == "memory"  ? gpu::Fault::kOutOfMemory
                                  : gpu::Fault::kNone);
  return info.Env().Undefined();
}
#endif

}  // namespace

void RegisterGpu(Napi::Env env, Napi::Object exports) {
  exports.Set("gpuStatus", Napi::Function::New(env, Status));
  exports.Set("gpuStepBytes", Napi::Function::New(env, StepBytes));
#if defined(KVTIER_EMULATED)
  exports.Set("gpuInject", Napi::Function::New(env, Inject));
#endif
}

}  // namespace kvtier
