// Node-API face of calls to file systems that may hang: each device has a thread of its own for them. Mirrors the "calls to
// the file system of a device" part of binding.ts, in its order.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "background.h"
#include "binding.h"
#include "binding_arena.h"
#include "binding_files.h"
#include "no_thread.h"

namespace kvtier {
namespace {

constexpr uint64_t kPrepareChunkBytes = uint64_t{4} << 20;

struct FilesBox {
  std::shared_ptr<WorkQueue> queue;  // null: closed
};

SystemFailure Failure(const std::string& path, const char* what, int error) {
  return SystemFailure("IO: " + path + ": cannot be " + what + " (" + std::strerror(error) + ")", error);
}

struct Descriptor {
  int fd;
  explicit Descriptor(int number) : fd(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { if (fd >= 0) close(fd); }
  int Release() { return std::exchange(fd, -1); }
};

int Open(const std::string& path, int flags) {
  for (;;) {
    const int fd = open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd >= 0 || errno != EINTR) return fd;
  }
}

// All of it, or the errno.
int WriteAt(int fd, const uint8_t* bytes, uint64_t count, uint64_t position) {
  for (uint64_t done = 0; done < count;) {
    const ssize_t moved = pwrite(fd, bytes + done, count - done, static_cast<off_t>(position + done));
    if (moved > 0) done += static_cast<uint64_t>(moved);
    else if (moved == 0) return EIO;
    else if (errno != EINTR) return errno;
  }
  return 0;
}

Napi::Value FilesOpen(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  std::shared_ptr<WorkQueue> queue;
  try {
    queue = std::make_shared<WorkQueue>(1);
  } catch (const std::exception& error) {
    throw Napi::Error::New(env, NoThread(error));
  }
  return Napi::External<FilesBox>::New(env, new FilesBox{std::move(queue)},
                                       [](Napi::Env, FilesBox* box) { delete box; });
}

void FilesClose(const Napi::CallbackInfo& info) {
  if (!info[0].IsExternal()) throw Napi::TypeError::New(info.Env(), "not a files handle");
  info[0].As<Napi::External<FilesBox>>().Data()->queue.reset();
}

Napi::Value FileFolder(const Napi::CallbackInfo& info) {
  const std::string path = TextOf(info[1]);
  const bool withParents = info[2].As<Napi::Boolean>().Value();
  const auto work = [path, withParents] {
    // Parents first; what is there already is fine.
    for (size_t at = withParents ? path.find('/', 1) : std::string::npos;; at = path.find('/', at + 1)) {
      const std::string part = path.substr(0, at);
      if (mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) throw Failure(part, "made", errno);
      if (at == std::string::npos) break;
    }
    struct stat facts{};
    if (stat(path.c_str(), &facts) != 0) throw Failure(path, "looked at", errno);
    if (!S_ISDIR(facts.st_mode)) throw Failure(path, "used as a folder", ENOTDIR);
  };
  return RunOn(*FilesOf(info[0]), info.Env(), work, [](Napi::Env e) { return e.Undefined(); });
}

// Which file it is, of all that are there.
struct Identity {
  uint64_t device;
  uint64_t inode;
  explicit Identity(const struct stat& facts) : device(facts.st_dev), inode(facts.st_ino) {}
  bool operator==(const Identity&) const = default;
  Napi::Object In(Napi::Env env) const {
    auto result = Napi::Object::New(env);
    result["device"] = Napi::BigInt::New(env, device);
    result["inode"] = Napi::BigInt::New(env, inode);
    return result;
  }
};

std::optional<Identity> IdentityAt(const std::string& path) {
  struct stat facts{};
  if (stat(path.c_str(), &facts) == 0) return Identity(facts);
  if (errno == ENOENT) return std::nullopt;
  throw Failure(path, "looked at", errno);
}

Napi::Value FileIdentity(const Napi::CallbackInfo& info) {
  const std::string path = TextOf(info[1]);
  const auto found = std::make_shared<std::optional<Identity>>();
  return RunOn(*FilesOf(info[0]), info.Env(), [path, found] { *found = IdentityAt(path); },
               [found](Napi::Env e) -> Napi::Value { return *found ? Napi::Value((*found)->In(e)) : e.Null(); });
}

Napi::Value FileLock(const Napi::CallbackInfo& info) {
  const std::string path = TextOf(info[1]);
  // Closed, and so unlocked, where nobody is left who could take it.
  struct Locked {
    std::unique_ptr<Descriptor> file;
    std::optional<Identity> identity;
  };
  const auto locked = std::make_shared<Locked>();
  const auto work = [path, locked] {
    locked->file = std::make_unique<Descriptor>(OpenLocked(path));
    struct stat facts{};
    if (fstat(locked->file->fd, &facts) != 0) throw Failure(path, "looked at", errno);
    locked->identity = Identity(facts);
    if (IdentityAt(path) == locked->identity) return;
    throw std::runtime_error("IO: " + path + ": was removed while it was locked; the folder is not ours alone");
  };
  return RunOn(*FilesOf(info[0]), info.Env(), work, [locked](Napi::Env e) -> Napi::Value {
    auto result = locked->identity->In(e);
    result["lock"] = KeepLock(e, locked->file->Release());
    return result;
  });
}

Napi::Value FileNames(const Napi::CallbackInfo& info) {
  const std::string path = TextOf(info[1]);
  const auto names = std::make_shared<std::vector<std::string>>();
  const auto work = [path, names] {
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
    if (!folder) throw Failure(path, "listed", errno);
    for (;;) {
      errno = 0;
      const dirent* entry = readdir(folder.get());
      if (entry == nullptr && errno != 0) throw Failure(path, "listed", errno);
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names->push_back(name);
    }
  };
  return RunOn(*FilesOf(info[0]), info.Env(), work, [names](Napi::Env e) -> Napi::Value {
    auto out = Napi::Array::New(e, names->size());
    for (uint32_t i = 0; i < names->size(); ++i) out[i] = Napi::String::New(e, (*names)[i]);
    return out;
  });
}

Napi::Value FileBytes(const Napi::CallbackInfo& info) {
  const std::string path = TextOf(info[1]);
  const auto bytes = std::make_shared<double>(-1);
  const auto work = [path, bytes] {
    struct stat facts{};
    if (lstat(path.c_str(), &facts) == 0) *bytes = S_ISREG(facts.st_mode) ? static_cast<double>(facts.st_size) : 0;
    else if (errno != ENOENT) throw Failure(path, "looked at", errno);
  };
  return RunOn(*FilesOf(info[0]), info.Env(), work,
               [bytes](Napi::Env e) -> Napi::Value { return Napi::Number::New(e, *bytes); });
}

Napi::Value FileRead(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = TextOf(info[1]);
  const uint64_t position = WholeOf(env, NumberOf(info[2]), "position");
  const uint64_t count = WholeOf(env, NumberOf(info[3]), "bytes");
  auto read = std::make_shared<std::unique_ptr<std::vector<uint8_t>>>(std::make_unique<std::vector<uint8_t>>());
  const auto work = [=] {
    std::vector<uint8_t>& bytes = **read;
    const Descriptor file(Open(path, O_RDONLY));
    if (file.fd < 0) throw Failure(path, "opened", errno);
    bytes.resize(count);
    uint64_t done = 0;
    while (done < count) {
      const ssize_t moved = pread(file.fd, bytes.data() + done, count - done, static_cast<off_t>(position + done));
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) throw Failure(path, "read", errno);
      if (moved == 0) break;
      done += static_cast<uint64_t>(moved);
    }
    bytes.resize(done);
  };
  return RunOn(*FilesOf(info[0]), env, work, [read](Napi::Env e) -> Napi::Value {
    auto* bytes = read->release();
    return Napi::Buffer<uint8_t>::New(
        e, bytes->data(), bytes->size(), [](Napi::Env, uint8_t*, std::vector<uint8_t>* owner) { delete owner; }, bytes);
  });
}

Napi::Value FileWrite(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = TextOf(info[1]);
  const auto given = info[2].As<Napi::Float64Array>();
  const auto source = info[3].As<Napi::Uint8Array>();
  std::vector<uint64_t> positions(given.ElementLength());
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = WholeOf(env, given[i], "position");
  if (positions.empty() || source.ByteLength() % positions.size() != 0) {
    throw Napi::RangeError::New(env, "pieces of one size, one for each position");
  }
  const uint64_t piece = source.ByteLength() / positions.size();
  const uint64_t padded = info[4].IsNumber() ? WholeOf(env, NumberOf(info[4]), "padded bytes") : piece;
  if (padded < piece || padded > kPrepareChunkBytes + piece) throw Napi::RangeError::New(env, "padded bytes");
  // A copy: the array is JavaScript's, and a call that hangs may outlive what it was made for.
  const std::vector<uint8_t> bytes(source.Data(), source.Data() + source.ByteLength());
  const auto work = [=] {
    const Descriptor file(Open(path, O_WRONLY));
    if (file.fd < 0) throw Failure(path, "opened", errno);
    std::vector<uint8_t> page(padded > piece ? padded : 0);
    for (size_t i = 0; i < positions.size(); ++i) {
      const uint8_t* from = bytes.data() + i * piece;
      if (!page.empty()) from = static_cast<const uint8_t*>(std::memcpy(page.data(), from, piece));
      if (const int error = WriteAt(file.fd, from, padded, positions[i]); error != 0) {
        throw Failure(path, "written", error);
      }
    }
  };
  return RunOn(*FilesOf(info[0]), env, work, [](Napi::Env e) { return e.Undefined(); });
}

Napi::Value FileMake(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = TextOf(info[1]);
  const auto source = info[2].As<Napi::Uint8Array>();
  const std::vector<uint8_t> bytes(source.Data(), source.Data() + source.ByteLength());
  const auto work = [=] {
    int error = 0;
    {
      const Descriptor file(Open(path, O_CREAT | O_TRUNC | O_WRONLY));
      if (file.fd < 0) throw Failure(path, "made", errno);
      error = WriteAt(file.fd, bytes.data(), bytes.size(), 0);
    }
    if (error == 0) return;
    unlink(path.c_str());
    throw Failure(path, "written", error);
  };
  return RunOn(*FilesOf(info[0]), env, work, [](Napi::Env e) { return e.Undefined(); });
}

// Write zeros all over a new file, so that later writes meet written extents (2 to 10 times as fast as fresh ones).
void Prepare(const std::string& path, uint64_t bytes) {
  const Descriptor file(Open(path, O_CREAT | O_EXCL | O_WRONLY | O_DIRECT));
  if (file.fd < 0) throw Failure(path, "created", errno);
  int error;
  do {
    error = posix_fallocate(file.fd, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  const std::unique_ptr<void, decltype(&std::free)> zeros(std::aligned_alloc(kPage, kPrepareChunkBytes), std::free);
  if (!zeros) error = ENOMEM;
  else std::memset(zeros.get(), 0, kPrepareChunkBytes);
  for (uint64_t from = 0; error == 0 && from < bytes; from += kPrepareChunkBytes) {
    const auto* chunk = static_cast<const uint8_t*>(zeros.get());
    error = WriteAt(file.fd, chunk, std::min(kPrepareChunkBytes, bytes - from), from);
  }
  if (error == 0) return;
  unlink(path.c_str());
  throw SystemFailure("IO: " + path + ": no space for " + std::to_string(bytes) + " bytes (" + std::strerror(error) + ")",
                      error);
}

Napi::Value FilePrepare(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = TextOf(info[1]);
  const uint64_t bytes = WholeOf(env, NumberOf(info[2]), "bytes");
  if (bytes == 0 || bytes % kPage != 0) throw Napi::RangeError::New(env, "bytes is a whole number of pages");
  return RunOn(*FilesOf(info[0]), env, [=] { Prepare(path, bytes); }, [](Napi::Env e) { return e.Undefined(); });
}

Napi::Value FileRename(const Napi::CallbackInfo& info) {
  const std::string from = TextOf(info[1]);
  const std::string to = TextOf(info[2]);
  const auto work = [from, to] {
    if (rename(from.c_str(), to.c_str()) != 0) throw Failure(from, "renamed", errno);
  };
  return RunOn(*FilesOf(info[0]), info.Env(), work, [](Napi::Env e) { return e.Undefined(); });
}

Napi::Value FileRemove(const Napi::CallbackInfo& info) {
  const std::string path = TextOf(info[1]);
  const auto work = [path] {
    if (unlink(path.c_str()) != 0 && errno != ENOENT) throw Failure(path, "removed", errno);
  };
  return RunOn(*FilesOf(info[0]), info.Env(), work, [](Napi::Env e) { return e.Undefined(); });
}

}  // namespace

std::shared_ptr<WorkQueue> FilesOf(const Napi::Value& value) {
  if (!value.IsExternal()) throw Napi::TypeError::New(value.Env(), "not a files handle");
  auto queue = value.As<Napi::External<FilesBox>>().Data()->queue;
  if (!queue) throw Napi::Error::New(value.Env(), "the files handle is closed");
  return queue;
}

void RegisterFiles(Napi::Env env, Napi::Object exports) {
  exports["filesOpen"] = Napi::Function::New(env, FilesOpen);
  exports["filesClose"] = Napi::Function::New(env, FilesClose);
  exports["fileFolder"] = Napi::Function::New(env, FileFolder);
  exports["fileIdentity"] = Napi::Function::New(env, FileIdentity);
  exports["fileLock"] = Napi::Function::New(env, FileLock);
  exports["fileNames"] = Napi::Function::New(env, FileNames);
  exports["fileBytes"] = Napi::Function::New(env, FileBytes);
  exports["fileRead"] = Napi::Function::New(env, FileRead);
  exports["fileWrite"] = Napi::Function::New(env, FileWrite);
  exports["fileMake"] = Napi::Function::New(env, FileMake);
  exports["filePrepare"] = Napi::Function::New(env, FilePrepare);
  exports["fileRename"] = Napi::Function::New(env, FileRename);
  exports["fileRemove"] = Napi::Function::New(env, FileRemove);
}

}  // namespace kvtier
