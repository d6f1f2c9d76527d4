// The emulator is no kinder than a GPU: a kernel that moves 16 bytes at once, at an address that is no multiple of 16, ends there, and its name
// is told. Each in a process of its own.
#include "check.h"

#if defined(KVTIER_EMULATED)
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "../gpu/device.h"

namespace kvtier::cuda::check {
namespace {

// What a kernel of one warp said before it was ended; "" where it ends well.
std::string SaidBy(void (*kernel)()) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    dup2(ends[1], STDERR_FILENO);
    const gpu::emulated::Grid grid{{1}, {32}, 1024, kernel, "under test"};
    gpu::emulated::RunGrids({&grid, 1});
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char piece[256];
  for (ssize_t count; (count = read(ends[0], piece, sizeof piece)) > 0;) said.append(piece, static_cast<size_t>(count));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0, ended = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  return well == said.empty() && (well || ended) ? said : "ended otherwise: " + said;
}

std::string Misaligned(const std::string& what, int by) {
  return "emulator: kernel under test: " + what + " lies " + std::to_string(by) + " bytes past a multiple of 16\n";
}

alignas(16) uint8_t memory[256];

KVTIER_CHECK(alignment) {
  ExpectTrue("CopyAsync16", "what is aligned is copied", SaidBy([] {
               KVTIER_DYNAMIC_SHARED(shared);
               gpu::CopyAsync16(shared + 16 * threadIdx.x, memory + 16);
               gpu::CopyAsync16(shared, memory + 8, false);  // is not read
               uint32_t words[4];
               gpu::LoadMatrix4(words, shared + 16 * threadIdx.x);
               gpu::StoreWide(memory, gpu::LoadWide(memory + 16));
             }) == "");
  ExpectTrue("CopyAsync16", "not from everywhere",
             SaidBy([] { gpu::CopyAsync16(gpu::emulated::SharedMemory(), memory + 8); }) == Misaligned("the source of cp.async", 8));
  ExpectTrue("CopyAsync16", "not to everywhere, zeros neither",
             SaidBy([] { gpu::CopyAsync16(gpu::emulated::SharedMemory() + 4, memory, false); }) == Misaligned("the target of cp.async", 4));
  ExpectTrue("LoadMatrix4", "no row of any lane", SaidBy([] {
               uint32_t words[4];
               gpu::LoadMatrix4(words, gpu::emulated::SharedMemory() + (threadIdx.x == 31 ? 2 : 0));
             }) == Misaligned("a row of ldmatrix", 2));
  ExpectTrue("LoadMatrix4Transposed", "no row of any lane", SaidBy([] {
               uint32_t words[4];
               gpu::LoadMatrix4Transposed(words, gpu::emulated::SharedMemory() + (threadIdx.x == 0 ? 8 : 0));
             }) == Misaligned("a row of ldmatrix", 8));
  ExpectTrue("LoadWide", "not from everywhere", SaidBy([] { (void)gpu::LoadWide(memory + 2); }) == Misaligned("a load of 16 bytes", 2));
  ExpectTrue("StoreWide", "not to everywhere", SaidBy([] { gpu::StoreWide(memory + 12, {}); }) == Misaligned("a store of 16 bytes", 12));
  ExpectTrue("LoadStreaming", "not from everywhere", SaidBy([] {
               (void)gpu::LoadStreaming(reinterpret_cast<const uint4*>(memory + 8));
             }) == Misaligned("a load of 16 bytes", 8));
}

}  // namespace
}  // namespace kvtier::cuda::check
#endif
