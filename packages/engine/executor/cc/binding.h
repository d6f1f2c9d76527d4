#pragma once
#include <napi.h>

#include "backend.h"

namespace kvtier {

// What binding.ts hands over, read; the GPU's options from undefined are the defaults.
Shape ReadShape(const Napi::Object& object);
WeightPlan ReadPlan(const Napi::Object& object);
Limits ReadLimits(const Napi::Object& object);
GpuOptions ReadGpu(const Napi::Value& value);

void RegisterExecutor(Napi::Env env, Napi::Object exports);
// Content digests of files, and the machine's limits for the benches (binding_tools.cc).
void RegisterTools(Napi::Env env, Napi::Object exports);

#if defined(KVTIER_CUDA)
// Questions about the GPU (packages/engine/cuda/backend_tools.cc).
void RegisterGpu(Napi::Env env, Napi::Object exports);
#endif

}  // namespace kvtier
