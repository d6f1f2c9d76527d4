#include "gemm.h"

namespace kvtier::cuda {

Gemm::Gemm(const std::string& cublaslt) {
  std::string why = "switched off";
#if defined(KVTIER_EMULATED)
  if (cublaslt != "off") why = "the emulator has no GPU";
#else
  if (cublaslt != "off") library_ = CublasLt::Load(cublaslt, &why);
#endif
  name_ = library_ ? library_->name() : "own kernels, without cuBLASLt: " + why;
}

void Gemm::Run(Stream& stream, NumberType type, const GemmArgs& args) {
  if (library_ && library_->Run(stream, type, args)) return;
  GemmOurs(stream, type, args);
}

}  // namespace kvtier::cuda
