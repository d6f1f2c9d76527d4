// Node-API face of files and I/O. Mirrors the "files" part of binding.ts, in its order. Every row is checked here against the
// arena and the file table: a wrong one is an exception before anything was submitted.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "binding.h"
#include "binding_arena.h"
#include "binding_files.h"
#include "io_queue.h"
#include "object_header.h"
#include "lock_byte.h"

namespace kvtier {
namespace {

std::string Why() { return std::strerror(errno); }

// -- locks ------------------------------------------------------------------------------------------------------------

std::set<int>& Locks() {
  static std::set<int> locks;
  return locks;
}

Napi::Value LockFile(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  try {
    return KeepLock(env, OpenLocked(TextOf(info[0])));
  } catch (const SystemFailure& failure) {
    const auto error = Napi::Error::New(env, failure.what());
    error.Value()["errno"] = Napi::Number::New(env, failure.number);
    throw error;
  } catch (const std::runtime_error& held) {
    throw Napi::Error::New(env, held.what());
  }
}

void Unlock(const Napi::CallbackInfo& info) {
  const int fd = info[0].As<Napi::Number>().Int32Value();
  if (Locks().erase(fd) == 1) close(fd);
}

struct Mapping {
  uint8_t* at;
  size_t bytes;
  void Unmap() {
    if (at != nullptr) munmap(at, bytes);
    at = nullptr;
  }
  ~Mapping() { Unmap(); }
};
Mapping& MappingOf(const Napi::Value& value) { return *value.As<Napi::External<Mapping>>().Data(); }

Napi::Value MapShared(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto bytes = static_cast<size_t>(NumberOf(info[1]));
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, info[0].As<Napi::Number>().Int32Value(), 0);
  if (map == MAP_FAILED) throw Napi::Error::New(env, "IO: " + std::to_string(bytes) + " bytes of a file cannot be mapped (" + Why() + ")");
  const auto collected = [](Napi::Env, Mapping* mapping) { delete mapping; };
  return Napi::External<Mapping>::New(env, new Mapping{static_cast<uint8_t*>(map), bytes}, collected);
}

void PutShared(const Napi::CallbackInfo& info) {
  Mapping& mapping = MappingOf(info[0]);
  const auto at = static_cast<size_t>(NumberOf(info[1]));
  if (mapping.at == nullptr || at >= mapping.bytes) throw Napi::Error::New(info.Env(), "SETUP: byte " + std::to_string(at) + " is not mapped");
  __atomic_store_n(mapping.at + at, static_cast<uint8_t>(info[2].As<Napi::Number>().Uint32Value()), __ATOMIC_RELEASE);
}

// readBuckets(fd, at, mask, tag, hashes, hashBytes, out): how many were read. Not mapped: whoever writes the file may make it shorter.
Napi::Value ReadBuckets(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const int fd = info[0].As<Napi::Number>().Int32Value();
  const auto at = static_cast<off_t>(info[1].As<Napi::Number>().Int64Value());
  const uint32_t mask = info[2].As<Napi::Number>().Uint32Value();
  const uint32_t tag = info[3].As<Napi::Number>().Uint32Value();
  const auto hashes = BytesOf(info[4]);
  const size_t hashBytes = info[5].As<Napi::Number>().Uint32Value();
  auto out = info[6].As<Napi::Uint8Array>();
  const size_t count = out.ByteLength();
  // Of the last one no more than what is read of it has to be there: callers step over hashes.
  if (hashBytes < 4 || (count > 0 && hashes.size() < (count - 1) * hashBytes + sizeof(uint32_t))) throw Napi::RangeError::New(env, "readBuckets: fewer hashes than bytes");
  uint32_t read = 0;
  for (; read < count; read++) {
    uint32_t word = 0;
    std::memcpy(&word, hashes.data() + read * hashBytes, sizeof word);
    if (pread(fd, out.Data() + read, 1, at + static_cast<off_t>((word ^ tag) & mask)) != 1) break;
  }
  return Napi::Number::New(env, read);
}

void UnmapShared(const Napi::CallbackInfo& info) { MappingOf(info[0]).Unmap(); }

Napi::Value HoldByteOf(const Napi::CallbackInfo& info) {
  const int fd = info[0].As<Napi::Number>().Int32Value();
  return Napi::Boolean::New(info.Env(), HoldByte(fd, static_cast<uint64_t>(NumberOf(info[1]))));
}

Napi::Value ByteIsHeld(const Napi::CallbackInfo& info) {
  const int fd = info[0].As<Napi::Number>().Int32Value();
  return Napi::Boolean::New(info.Env(), IsByteHeld(fd, static_cast<uint64_t>(NumberOf(info[1]))));
}

Napi::Value PeerGroups(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const int fd = info[0].As<Napi::Number>().Int32Value();
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) throw Napi::Error::New(env, "IO: peer credentials: " + Why());
  std::vector<gid_t> groups(64);
  for (;;) {
    bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    const bool all = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0;
    if (!all && errno != ERANGE) throw Napi::Error::New(env, "IO: peer groups: " + Why());
    groups.resize(bytes / sizeof(gid_t));  // as many as there are, also when they did not fit
    if (all) break;
  }
  groups.push_back(peer.gid);
  auto result = Napi::Array::New(env, groups.size());
  for (size_t i = 0; i < groups.size(); ++i) result[static_cast<uint32_t>(i)] = Napi::Number::New(env, groups[i]);
  return result;
}

Napi::Value PeerCredentials(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(info[0].As<Napi::Number>().Int32Value(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    throw Napi::Error::New(env, "IO: peer credentials: " + Why());
  }
  auto result = Napi::Object::New(env);
  result["pid"] = Napi::Number::New(env, peer.pid);
  result["uid"] = Napi::Number::New(env, peer.uid);
  return result;
}

// -- the queue -------------------------------------------------------------------------------------------------------

// Whether the queue's threads may still call JavaScript. It outlives the box: threads of an abandoned queue ask it.
struct Bell {
  std::mutex mutex;
  bool muted = false;
};

// What JavaScript holds. The thread-safe function keeps the event loop alive exactly while rows are in flight.
struct IoBox {
  std::shared_ptr<Arena> arena;
  std::unique_ptr<IoQueue> queue;
  Napi::ThreadSafeFunction callback;
  Napi::FunctionReference onComplete;
  uint64_t inFlightCount = 0;
  bool closing = false;  // JavaScript may not use it any more
  bool closed = false;   // nothing of it is left
  std::shared_ptr<Bell> bell = std::make_shared<Bell>();

  ~IoBox() {
    if (closed) return;
    queue->Close();
    callback.Release();
  }

  void Deliver(Napi::Env env) {
    const auto completions = queue->Take();
    if (completions.empty()) return;
    inFlightCount -= completions.size();
    if (inFlightCount == 0 && !closed) callback.Unref(env);
    auto tags = Napi::Float64Array::New(env, completions.size());
    auto results = Napi::Float64Array::New(env, completions.size());
    for (size_t i = 0; i < completions.size(); ++i) {
      tags[i] = completions[i].tag;
      results[i] = completions[i].result;
    }
    onComplete.Call({tags, results});
  }
};
using IoHandle = std::shared_ptr<IoBox>;

IoHandle IoOf(const Napi::Value& value) {
  if (!value.IsExternal()) throw Napi::TypeError::New(value.Env(), "not an I/O handle");
  const IoHandle box = *value.As<Napi::External<IoHandle>>().Data();
  if (box->closing) throw Napi::Error::New(value.Env(), "the I/O queue is closed");
  return box;
}

Napi::Value IoOpen(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto given = info[1].As<Napi::Object>();
  const uint64_t depth = WholeOf(env, NumberOf(given.Get("depth")), "depth");
  const uint64_t ioBytes = WholeOf(env, NumberOf(given.Get("ioBytes")), "ioBytes");
  const std::string backend = TextOf(given.Get("backend"));
  if (backend != "auto" && backend != "io_uring" && backend != "threads") throw Napi::TypeError::New(env, "backend");
  if (depth < 1 || depth > 1024) throw Napi::RangeError::New(env, "depth is 1 to 1024");
  if (ioBytes < kPage || ioBytes % kPage != 0 || ioBytes > (uint64_t{1} << 28)) {
    throw Napi::RangeError::New(env, "ioBytes is a whole number of pages, at most 256 MiB");
  }
  const auto box = std::make_shared<IoBox>();
  box->arena = ArenaOf(info[0]);
  box->onComplete = Napi::Persistent(info[2].As<Napi::Function>());
  box->callback = Napi::ThreadSafeFunction::New(env, info[2].As<Napi::Function>(), "kvtier io", 0, 1);
  // The call may run after the box is gone: it looks first.
  const auto wake = [weak = std::weak_ptr(box), bell = box->bell, callback = box->callback] {
    const std::lock_guard lock(bell->mutex);
    if (bell->muted) return;
    auto* target = new std::weak_ptr(weak);
    const auto deliver = [](Napi::Env e, Napi::Function, std::weak_ptr<IoBox>* waiting) {
      const IoHandle owner = waiting->lock();
      delete waiting;
      if (owner && !owner->closed && e != nullptr) owner->Deliver(e);
    };
    if (callback.NonBlockingCall(target, deliver) != napi_ok) delete target;
  };
  try {
    box->queue = std::make_unique<IoQueue>(box->arena, IoOptions{backend, static_cast<unsigned>(depth), ioBytes}, wake);
  } catch (const std::exception& error) {
    box->closing = box->closed = true;
    box->callback.Release();
    throw Napi::Error::New(env, error.what());
  }
  box->callback.Unref(env);
  return Napi::External<IoHandle>::New(env, new IoHandle(box), [](Napi::Env, IoHandle* handle) { delete handle; });
}

Napi::Value IoBackendOf(const Napi::CallbackInfo& info) {
  const IoHandle box = IoOf(info[0]);
  auto result = Napi::Object::New(info.Env());
  result["backend"] = Napi::String::New(info.Env(), box->queue->backend());
  result["reason"] = Napi::String::New(info.Env(), box->queue->reason());
  return result;
}

Napi::Value IoOpenFile(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const IoHandle box = IoOf(info[0]);
  const auto given = info[2].As<Napi::Object>();
  const uint64_t bytes = WholeOf(env, NumberOf(given.Get("bytes")), "bytes");
  try {
    const bool create = given.Get("create").As<Napi::Boolean>().Value();
    return Napi::Number::New(env, box->queue->OpenFile(TextOf(info[1]), create, bytes));
  } catch (const std::runtime_error& error) {
    throw Napi::Error::New(env, error.what());
  }
}

Napi::Value IoTakeFile(const Napi::CallbackInfo& info) {
  const IoHandle box = IoOf(info[0]);
  const std::string path = TextOf(info[2]);
  const auto file = std::make_shared<std::shared_ptr<IoFile>>();
  return RunOn(*FilesOf(info[1]), info.Env(), [path, file] { *file = IoQueue::Open(path); },
               [box, file](Napi::Env e) -> Napi::Value {
                 if (box->closing) throw Napi::Error::New(e, "the I/O queue is closed");
                 return Napi::Number::New(e, box->queue->Adopt(std::move(*file)));
               });
}

void IoCloseFile(const Napi::CallbackInfo& info) {
  auto file = IoOf(info[0])->queue->CloseFile(info[1].As<Napi::Number>().Uint32Value());
  // close(2) may wait for the device, too.
  if (file && info.Length() > 2 && info[2].IsExternal()) FilesOf(info[2])->Push([kept = std::move(file)] {});
}

// The first page of an object with the writer's sequence (the first 8 bytes of a row's identity) in its header. A copy: the slot
// itself may be on its way elsewhere.
FirstPage Stamped(const uint8_t* object, const uint8_t* sequence) {
  FirstPage page(static_cast<uint8_t*>(std::aligned_alloc(kPage, kPage)), std::free);
  if (!page) throw std::bad_alloc();
  std::memcpy(page.get(), object, kPage);
  ObjectHeader header;
  std::memcpy(&header, page.get(), sizeof(header));
  std::memcpy(&header.sequence, sequence, sizeof(header.sequence));
  header.headerChecksum = HeaderChecksum(header);
  std::memcpy(page.get(), &header, sizeof(header));
  return page;
}

void IoSubmit(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const IoHandle box = IoOf(info[0]);
  const auto numbers = info[1].As<Napi::Float64Array>();
  if (numbers.ElementLength() % 6 != 0) throw Napi::RangeError::New(env, "rows of 6 numbers");
  const size_t count = numbers.ElementLength() / 6;
  const bool identified = info.Length() > 2 && info[2].IsTypedArray();
  const uint8_t* identities = nullptr;
  if (identified) {
    const auto bytes = info[2].As<Napi::Uint8Array>();
    if (bytes.ByteLength() != count * 64) throw Napi::RangeError::New(env, "64 bytes of identity a row");
    identities = bytes.Data();
  }
  std::vector<std::shared_ptr<IoRow>> rows(count);
  for (size_t i = 0; i < count; ++i) {
    const double* given = numbers.Data() + i * 6;
    const auto row = std::make_shared<IoRow>();
    const uint64_t kind = WholeOf(env, given[1], "kind");
    if (kind > 3 || (kind >= 2 && !identified)) throw Napi::RangeError::New(env, "kind of a row");
    row->tag = given[0];
    row->kind = kind == 3 ? IoKind::kWrite : static_cast<IoKind>(kind);
    row->file = box->queue->File(static_cast<uint32_t>(WholeOf(env, given[2], "file")));
    if (!row->file) throw Napi::RangeError::New(env, "no such file");
    row->fileOffset = WholeOf(env, given[3], "fileOffset");
    row->arenaOffset = WholeOf(env, given[4], "arenaOffset");
    row->bytes = WholeOf(env, given[5], "bytes");
    if (row->fileOffset % kPage != 0 || row->arenaOffset % kPage != 0 || row->bytes % kPage != 0 || row->bytes == 0) {
      throw Napi::RangeError::New(env, "offsets and bytes of a row are whole pages");
    }
    if (!box->arena->Contains(row->arenaOffset, row->bytes)) throw Napi::RangeError::New(env, "row outside the arena");
    if (kind == 2) std::memcpy(row->identity.data(), identities + i * 64, 64);
    rows[i] = row;
  }
  for (size_t i = 0; i < count; ++i) {
    if (numbers.Data()[i * 6 + 1] != 3) continue;
    rows[i]->firstPage = Stamped(box->arena->base() + rows[i]->arenaOffset, identities + i * 64);
  }
  if (count == 0) return;
  if (box->inFlightCount == 0) box->callback.Ref(env);
  box->inFlightCount += count;
  box->queue->Submit(std::move(rows));
}

Napi::Value IoClose(const Napi::CallbackInfo& info) {
  const IoHandle box = IoOf(info[0]);
  box->closing = true;
  return RunApart(
      info.Env(), [box] { box->queue->Close(); },
      [box](Napi::Env env) -> Napi::Value {
        box->Deliver(env);  // what ended last
        box->closed = true;
        box->callback.Release();
        box->queue.reset();  // now, not when the handle is collected: the mapping goes with the last user
        box->arena.reset();
        return env.Undefined();
      });
}

// The queue's thread waits for a device that does not answer: nobody can join it. It, the arena's mapping and the files stay
// until the process ends.
void IoAbandon(const Napi::CallbackInfo& info) {
  const IoHandle box = IoOf(info[0]);
  {
    const std::lock_guard lock(box->bell->mutex);
    box->bell->muted = true;
  }
  box->closing = box->closed = true;
  box->queue.release();
  box->arena.reset();
  box->callback.Abort();
}

void IoFault(const Napi::CallbackInfo& info) {
  IoOf(info[0])->queue->Fault(info[1].As<Napi::Number>().Uint32Value(), info[2].As<Napi::Number>().Int32Value(),
                                info[3].As<Napi::Boolean>().Value());
}

}  // namespace

int OpenLocked(const std::string& path) {
  const int fd = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    const int error = errno;
    const char* remedy = error == EACCES || error == EPERM ? "; check its permissions" : "";
    throw SystemFailure("IO: " + path + ": cannot be opened (" + std::strerror(error) + ")" + remedy, error);
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    char text[32] = {};
    const ssize_t count = pread(fd, text, sizeof(text) - 1, 0);
    close(fd);
    if (error != EWOULDBLOCK) throw SystemFailure("IO: " + path + ": cannot be locked (" + std::strerror(error) + ")", error);
    const std::string pid = count > 0 && std::atoi(text) > 0 ? std::to_string(std::atoi(text)) : "unknown";
    throw std::runtime_error("LOCKED: " + path + ": held by process " + pid + "; stop it or choose another folder");
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  if (ftruncate(fd, 0) != 0 || pwrite(fd, pid.data(), pid.size(), 0) < 0) {
    // The name of the holder is a courtesy (a full disk has no room for it); the lock itself holds.
  }
  return fd;
}

Napi::Value KeepLock(Napi::Env env, int fd) {
  Locks().insert(fd);
  return Napi::Number::New(env, fd);
}

void RegisterIo(Napi::Env env, Napi::Object exports) {
  exports["lockFile"] = Napi::Function::New(env, LockFile);
  exports["unlock"] = Napi::Function::New(env, Unlock);
  exports["mapShared"] = Napi::Function::New(env, MapShared);
  exports["putShared"] = Napi::Function::New(env, PutShared);
  exports["readBuckets"] = Napi::Function::New(env, ReadBuckets);
  exports["unmapShared"] = Napi::Function::New(env, UnmapShared);
  exports["holdByte"] = Napi::Function::New(env, HoldByteOf);
  exports["isByteHeld"] = Napi::Function::New(env, ByteIsHeld);
  exports["peerCredentials"] = Napi::Function::New(env, PeerCredentials);
  exports["peerGroups"] = Napi::Function::New(env, PeerGroups);
  exports["ioOpen"] = Napi::Function::New(env, IoOpen);
  exports["ioBackend"] = Napi::Function::New(env, IoBackendOf);
  exports["ioOpenFile"] = Napi::Function::New(env, IoOpenFile);
  exports["ioTakeFile"] = Napi::Function::New(env, IoTakeFile);
  exports["ioCloseFile"] = Napi::Function::New(env, IoCloseFile);
  exports["ioSubmit"] = Napi::Function::New(env, IoSubmit);
  exports["ioClose"] = Napi::Function::New(env, IoClose);
  exports["ioAbandon"] = Napi::Function::New(env, IoAbandon);
  exports["ioFault"] = Napi::Function::New(env, IoFault);
}

}  // namespace kvtier
