// How cuBLASLt is called, against a library of its entry points that computes on the CPU (standin_cublaslt.cc): the result is
// that of our own kernels, each shape is asked for once, everything that is made is freed, and what cannot be loaded is said.
#include "../gemm/gemm.h"
#include "check.h"

#if defined(KVTIER_EMULATED)
#include <dlfcn.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace kvtier::cuda::check {
namespace {

constexpr char kPath[] = KVTIER_STANDIN_CUBLASLT;

int Counter(const char* name) {
  void* library = dlopen(kPath, RTLD_NOW | RTLD_NOLOAD);
  const auto function = reinterpret_cast<int (*)()>(dlsym(library, name));
  const int value = function();
  dlclose(library);
  return value;
}

// Target of one product, by the library and by version 1 of our kernels.
bool Same(CublasLt& library, NumberType type, int64_t rows, int64_t outputs, int64_t inputs, bool accumulate, bool target_f32, int64_t extra) {
  const NumberType target_type = target_f32 ? NumberType::kF32 : type;
  const int64_t source_stride = inputs + extra, target_stride = outputs + extra;
  const auto source = UploadAs(type, RandomFloats(1, rows * source_stride, -1, 1)), weight = UploadAs(type, RandomFloats(2, outputs * inputs, -1, 1));
  const auto before = RandomFloats(3, rows * target_stride, -1, 1);
  const auto ours = UploadAs(target_type, before), theirs = UploadAs(target_type, before);
  gpu::Stream stream;
  GemmArgs args{ours.data(), source.data(), weight.data(), rows, outputs, inputs, target_stride, source_stride, accumulate, target_f32};
  GemmOurs(stream, type, args, 1);
  Finish(stream);
  args.target = theirs.data();
  const bool done = library.Run(stream, type, args);
  return done && MaxRelativeError(DownloadAs(target_type, theirs), DownloadAs(target_type, ours)) <= 2 * Epsilon(target_type) + 1e-5;
}

KVTIER_CHECK(cublaslt_calls) {
  std::string why;
  {
    const auto library = CublasLt::Load(kPath, &why);
    ExpectTrue("CublasLt", "loads", library != nullptr && library->name() == std::string("cuBLASLt 13.1.2 (") + kPath + ")");
    bool same = true;
    for (const auto type : {NumberType::kF32, NumberType::kF16, NumberType::kBf16}) {
      for (const bool accumulate : {false, true}) {
        same = same && Same(*library, type, 5, 9, 16, accumulate, false, 0) && Same(*library, type, 3, 7, 11, accumulate, true, 2);
      }
    }
    ExpectTrue("CublasLt", "computes what our kernels compute", same);
    const int asked = Counter("standin_heuristics");
    ExpectTrue("CublasLt", "asks for each shape once", asked == 12 && Same(*library, NumberType::kF16, 5, 9, 16, true, false, 0) && Counter("standin_heuristics") == 12);
    ExpectTrue("CublasLt", "says when it has nothing for a shape", !Same(*library, NumberType::kF16, 13, 9, 16, false, false, 0));
    // More shapes than are remembered: all are served, and the first is asked for again.
    gpu::Stream stream;
    const auto source = UploadAs(NumberType::kF32, RandomFloats(1, 1100, -1, 1)), target = UploadAs(NumberType::kF32, std::vector<float>(1100));
    bool served = true;
    for (int64_t rows = 14; rows < 1100; ++rows) {
      served = served && library->Run(stream, NumberType::kF32, {target.data(), source.data(), source.data(), rows, 1, 1, 1, 1, false, false});
    }
    ExpectTrue("CublasLt", "more shapes than it remembers", served && Same(*library, NumberType::kF16, 5, 9, 16, true, false, 0) && Counter("standin_heuristics") == 13 + 1086 + 1);
  }
  ExpectTrue("CublasLt", "frees all that it makes", Counter("standin_alive") == 0);
}

// Whichever of the two is the faster one for few rows: the product is right, in the round that measures and after it.
KVTIER_CHECK(cublaslt_or_ours) {
  Gemm gemm({.cublaslt = kPath});
  ExpectTrue("Gemm", "is named", gemm.name() == std::string("cuBLASLt 13.1.2 (") + kPath + "), own kernels where they are faster");
  constexpr auto kType = NumberType::kBf16;
  constexpr int64_t kOutputs = 24, kInputs = 64;
  for (const int64_t rows : {1, 13, 40, 70}) {  // 13: the library has nothing
    const auto source = UploadAs(kType, RandomFloats(1, rows * kInputs, -1, 1)), weight = UploadAs(kType, RandomFloats(2, kOutputs * kInputs, -1, 1));
    const auto zero = std::vector<float>(static_cast<size_t>(rows * kOutputs));
    const auto expected = UploadAs(kType, zero), target = UploadAs(kType, zero);
    GemmArgs args{expected.data(), source.data(), weight.data(), rows, kOutputs, kInputs, kOutputs, kInputs, false, false};
    gpu::Stream stream;
    GemmOurs(stream, kType, args, 1);
    args.target = target.data();
    double error = 0;
    for (int round = 0; round < 2; ++round) {
      gemm.Run(stream, kType, args);
      Finish(stream);
      error = std::max(error, MaxRelativeError(DownloadAs(kType, target), DownloadAs(kType, expected)));
    }
    Expect("Gemm", std::to_string(rows) + " rows", error, 2 * Epsilon(kType) + 1e-5);
  }
}

// A product of `rows` by `gemm`, and which algorithm of the library's it took: 0 when none.
int AlgorithmOf(Gemm& gemm, int64_t rows, int64_t outputs = 24) {
  constexpr auto kType = NumberType::kBf16;
  constexpr int64_t kInputs = 64;
  const auto source = UploadAs(kType, RandomFloats(1, rows * kInputs, -1, 1));
  const auto one = UploadAs(kType, RandomFloats(2, outputs * kInputs, -1, 1)), other = UploadAs(kType, RandomFloats(3, outputs * kInputs, -1, 1));
  const auto target = UploadAs(kType, std::vector<float>(static_cast<size_t>(rows * outputs)));
  const void* const layers[] = {one.data(), other.data()};
  gpu::Stream stream;
  const GemmArgs args{target.data(), source.data(), one.data(), rows, outputs, kInputs, outputs, kInputs, false, false};
  gemm.Run(stream, kType, args, layers);  // chooses
  Finish(stream);
  const auto forget = reinterpret_cast<void (*)(int)>(dlsym(dlopen(kPath, RTLD_NOW | RTLD_NOLOAD), "standin_forget"));
  forget(0);
  gemm.Run(stream, kType, args, layers);
  Finish(stream);
  return Counter("standin_last_algorithm");
}

// A clock that says one time after the other: of ours, then of each algorithm.
std::function<double(Stream&, const gpu::Graph&)> Says(std::vector<double> times, int* asked) {
  return [times, asked](Stream&, const gpu::Graph&) { return times[static_cast<size_t>((*asked)++) % times.size()]; };
}

KVTIER_CHECK(cublaslt_choice) {
  std::string name = TemporaryName("choices-");
  const std::string folder = std::string(mkdtemp(name.data())) + "/made";
  int asked = 0;
  {
    Gemm second({.cublaslt = kPath, .choices_folder = folder, .stopwatch = Says({5, 7, 3}, &asked)});
    ExpectTrue("Gemm", "takes the fastest of the library's algorithms", AlgorithmOf(second, 8) == 4713 && asked == 3);
    ExpectTrue("Gemm", "measures each size that decodes are padded to once", AlgorithmOf(second, 7) == 4713 && asked == 3 && AlgorithmOf(second, 9) == 4713 && asked == 6);
  }
  Gemm next({.cublaslt = kPath, .choices_folder = folder, .stopwatch = Says({1, 7, 3}, &asked)});
  Gemm beside({.cublaslt = kPath, .choices_folder = folder, .stopwatch = Says({9, 1, 3}, &asked)});
  ExpectTrue("Gemm", "the next process chooses alike and measures nothing", AlgorithmOf(next, 8) == 4713 && asked == 6);
  ExpectTrue("Gemm", "ours where it is the fastest", AlgorithmOf(next, 24) == 0 && asked == 9);
  ExpectTrue("Gemm", "what another process kept meanwhile wins", AlgorithmOf(beside, 24) == 0 && asked == 12);
  Gemm alone({.cublaslt = kPath, .stopwatch = Says({9, 1, 3}, &asked)});
  ExpectTrue("Gemm", "without a folder nothing is kept", AlgorithmOf(alone, 24) == 4711 && asked == 15);
  Gemm equal({.cublaslt = kPath, .choices_folder = folder, .equal_bits = true, .stopwatch = Says({9, 1, 3}, &asked)});
  ExpectTrue("Gemm", "equal bits: ours for few rows, the library's favourite for more", AlgorithmOf(equal, 8) == 0 && AlgorithmOf(equal, 64) == 0 && asked == 15 && AlgorithmOf(equal, 65) == 4711);

  // A file that is cut short, or somebody else's, is as if there were none.
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".txt") file = entry.path();
  }
  std::string whole;
  {
    std::ifstream in(file);
    whole.assign(std::istreambuf_iterator<char>(in), {});
  }
  ExpectTrue("Choices", "is named after GPU and library", file.find("emulated-90-13.1.2-") != std::string::npos);
  int wrong = 0;
  for (const std::string& text : {whole.substr(0, whole.size() - 4), std::string("something else\n"), std::string(), whole.substr(0, 60) + "x" + whole.substr(61)}) {
    std::ofstream(file, std::ios::trunc) << text;
    const Choices choices(folder, "emulated 90 13.1.2 kernels 3");
    wrong += choices.Find({NumberType::kBf16, 8, 24, 64, false}) == nullptr ? 0 : 1;
  }
  ExpectTrue("Choices", "a file that is not whole counts for nothing", wrong == 0);
  std::filesystem::remove_all(std::filesystem::path(folder).parent_path());
}

KVTIER_CHECK(cublaslt_missing) {
  std::string why;
  ExpectTrue("CublasLt", "no such file", CublasLt::Load("/nonexistent/libcublasLt.so", &why) == nullptr && why.find("/nonexistent/libcublasLt.so") != std::string::npos);
  ExpectTrue("CublasLt", "another library", CublasLt::Load("libm.so.6", &why) == nullptr && why == "libm.so.6 has no cublasLtCreate");
}

}  // namespace
}  // namespace kvtier::cuda::check
#endif
