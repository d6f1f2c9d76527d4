// What is used of libuv, which Node exports with a stable ABI and whose headers are no part of Node-API.
#pragma once
#include <cstdint>
#include <cstdlib>

extern "C" {
struct uv_loop_s;
struct uv_handle_s;
struct uv_prepare_s;
int uv_prepare_init(struct uv_loop_s*, struct uv_prepare_s*);
int uv_prepare_start(struct uv_prepare_s*, void (*)(struct uv_prepare_s*));
void uv_unref(struct uv_handle_s*);
size_t uv_handle_size(int);
uint64_t uv_metrics_idle_time(struct uv_loop_s*);  // callable from any thread
struct uv_loop_s* uv_default_loop(void);
}

namespace kvtier {

// Just before the loop waits. As long as the process lives; it does not keep it alive.
inline void AtEachTurnsEnd(struct uv_loop_s* loop, void (*ended)(struct uv_prepare_s*)) {
  constexpr int kUvPrepare = 9;
  auto* prepare = static_cast<struct uv_prepare_s*>(std::calloc(1, uv_handle_size(kUvPrepare)));
  uv_prepare_init(loop, prepare);
  uv_prepare_start(prepare, ended);
  uv_unref(reinterpret_cast<struct uv_handle_s*>(prepare));
}

}  // namespace kvtier
