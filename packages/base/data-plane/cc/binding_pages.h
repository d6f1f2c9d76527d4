// Memory for many small pieces that live until the garbage collector has seen the last of them: slabs of whole huge pages, which are used
// again. A first write to a new page costs more than what is then written there: encoding 4.5 KB of events took 2 us into pages that were
// used before, 3.5 to 30 us into new ones of a kernel that had no huge pages to give.
//
// Invariant: no more bytes are kept without a user than all users together asked for, and a few slabs that nobody needs to ask for.
#pragma once
#include <napi.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvtier {

class Pages {
 public:
  static constexpr size_t kSlabBytes = 2 << 20;

  // `bytes`, or some more, in huge pages where the kernel has some. Throws SystemFailure.
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // Those that were used before, if there are some, else new ones; with `touch` each page is written once.
  static std::unique_ptr<Pages> Take(size_t bytes, bool touch);
  // To JavaScript, until it is collected there.
  static Napi::ArrayBuffer Give(Napi::Env env, std::unique_ptr<Pages> pages);
  // So many more bytes may wait for the next user; fewer when negative, and what is kept beyond is given back now.
  static void KeepMore(int64_t bytes);

 private:
  static void Keep(std::unique_ptr<Pages> pages);
  void Touch();

  size_t bytes_;
  uint8_t* at_;
};

}  // namespace kvtier
