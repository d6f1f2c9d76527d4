// The client's threads and their jobs: begun, cut into pieces, ended, taken. What they work on: client_memory.cc.
#include "client.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <tuple>

namespace kvtier {
namespace {

constexpr uint64_t kPieceBytes = 4 << 20;           // what a thread takes at once
// Of what somebody waits for each thread takes its share; for less than this another thread is not worth waking.
constexpr uint64_t kLeastSharedBytes = 1 << 20;
// How late these threads may be woken. Who waits for a GPU asks every few microseconds: the usual 50 would make each pause eleven times as long.
// Of the engine's threads nothing is changed.
constexpr unsigned long kTimerSlackNs = 1000;

/// Blocks of a piece on a CPU. Stores are nobody's wait, and take no second core from the engine while one will do.
uint64_t PieceBlocks(JobKind kind, uint64_t blocks, uint64_t payload_bytes, uint64_t threads) {
  const uint64_t most = kPieceBytes / payload_bytes;
  const uint64_t share = kind == JobKind::kStore ? most : (blocks + threads - 1) / threads;
  return std::max<uint64_t>(1, std::clamp(share, kLeastSharedBytes / payload_bytes, most));
}

void CheckOptions(const kvtier_options& options) {
  const auto in = [](uint32_t value, uint32_t least, uint32_t most) { return value >= least && value <= most; };
  if (!in(options.load_threads, 1, 64) || !in(options.store_threads, 1, 64) || options.store_niceness > 19 ||
      !in(options.max_jobs, 1, 1'000'000) || !in(options.device_deadline_ms, 1, 600'000)) {
    throw Failure(KVTIER_CONFIG,
                  "CONFIG: options out of range: 1 to 64 threads, niceness 0 to 19, 1 to 1000000 jobs, a GPU's deadline of 1 to 600000 ms");
  }
}

}  // namespace

std::chrono::steady_clock::time_point After(int64_t wait_us) {
  constexpr int64_t kLongest = int64_t{3600} * 1'000'000;
  return std::chrono::steady_clock::now() + std::chrono::microseconds(std::clamp<int64_t>(wait_us, 0, kLongest));
}

Client::Client(const kvtier_options& options) : options_(options) {
  CheckOptions(options);
  try {
    Start(loads_, "kvtier-load", options.load_threads, 0);
    Start(stores_, "kvtier-store", options.store_threads, options.store_niceness);
  } catch (const std::exception& error) {
    Close(After(3'600'000'000));
    throw Failure(KVTIER_SETUP, std::string("SETUP: no threads for copies (") + error.what() + "); raise the limit of processes");
  }
}

Client::~Client() {
  if (pinner_.joinable()) pinner_.join();
}

void Client::Start(Lane& lane, const char* name, uint32_t threads, uint32_t niceness) {
  for (uint32_t i = 0; i < threads; ++i) {
    {
      const std::lock_guard lock(mutex_);
      ++working_;
    }
    try {
      lane.threads.emplace_back([this, &lane, name, niceness] {
        pthread_setname_np(pthread_self(), name);
        prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
        if (niceness > 0) setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), static_cast<int>(niceness));
        Work(lane);
      });
    } catch (...) {
      const std::lock_guard lock(mutex_);
      --working_;
      throw;
    }
  }
}

int64_t Client::Begin(JobKind kind, int64_t arena, int64_t layout, uint64_t payload_bytes, std::span<const uint64_t> blocks,
                      std::span<const uint64_t> offsets, std::span<const uint64_t> sums, int64_t after) {
  auto job = std::make_shared<Job>();
  job->kind = kind;
  job->payload_bytes = payload_bytes;
  job->blocks.assign(blocks.begin(), blocks.end());
  job->offsets.assign(offsets.begin(), offsets.end());
  job->sums.assign(sums.begin(), sums.end());
  job->sums.resize(offsets.size());
  job->good.resize(offsets.size(), KVTIER_MISSED);

  const std::lock_guard lock(mutex_);
  const auto mapped = arenas_.find(arena);
  if (mapped == arenas_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no arena " + std::to_string(arena) + " is mapped");
  job->mapped = mapped->second;
  if (kind != JobKind::kCheck) {
    const auto known = layouts_.find(layout);
    if (known == layouts_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no layout " + std::to_string(layout));
    job->layout = known->second;
    job->payload_bytes = job->layout->payload_bytes;
    if (job->layout->device) job->device_arena = job->mapped->devices.at(job->layout->device->device());
  }
  if (after != 0) {
    const auto mark = marks_.find(after);
    if (mark == marks_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no mark " + std::to_string(after));
    job->after = mark->second;
    if (job->device_arena == nullptr || job->after->device != job->device_arena->device()) {
      throw Failure(KVTIER_CONFIG, "CONFIG: mark " + std::to_string(after) + " is not of the layout's device");
    }
  }
  if (offsets.empty()) throw Failure(KVTIER_CONFIG, "CONFIG: a job of no blocks");
  for (const uint64_t block : blocks) {
    if (block >= job->layout->blocks) {
      throw Failure(KVTIER_CONFIG, "CONFIG: block " + std::to_string(block) + " of a layout of " + std::to_string(job->layout->blocks));
    }
  }
  for (const uint64_t offset : offsets) {
    if (job->payload_bytes == 0 || !job->mapped->arena->Contains(offset, job->payload_bytes)) {
      throw Failure(KVTIER_PROTOCOL, "PROTOCOL: offset " + std::to_string(offset) + " with " + std::to_string(job->payload_bytes) +
                                         " bytes is outside of the arena");
    }
  }
  if (closing_ || jobs_.size() >= options_.max_jobs) {
    throw Failure(KVTIER_BUSY, "BUSY: " + std::to_string(jobs_.size()) + " copies are under way or were not taken; take them first");
  }
  Lane& lane = LaneOf(*job);
  job->piece_blocks = job->device_arena ? job->layout->device->stage_blocks()
                                        : PieceBlocks(kind, offsets.size(), job->payload_bytes, lane.threads.size());
  const int64_t number = next_number_++;
  jobs_[number] = job;
  lane.queue.emplace_back(number, std::move(job));
  lane.ready.notify_all();
  return number;
}

void Client::Work(Lane& lane) {
  std::vector<CopyPiece> pieces;  // of one block; grows to the largest layout
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!hung_.empty()) SettleHung(lock);
    const auto wanted = [&] { return closing_ || !lane.queue.empty(); };
    if (hung_.empty()) {
      lane.ready.wait(lock, [&] { return wanted() || !hung_.empty(); });
    } else if (!wanted()) {
      lane.ready.wait_for(lock, kAskPeriod);
    }
    if (closing_) break;
    if (lane.queue.empty()) continue;
    auto [number, job] = lane.queue.front();
    size_t first = job->next, end = std::min(first + job->piece_blocks, job->offsets.size());
    if (job->again.empty()) {
      job->next = end;
    } else {
      std::tie(first, end) = job->again.back();
      job->again.pop_back();
    }
    if (job->next == job->offsets.size() && job->again.empty()) lane.queue.pop_front();
    ++job->running;
    lock.unlock();
    bool ended = true;
    if (job->device_arena != nullptr) {
      ended = RunDevicePiece(number, job, first, end);
    } else {
      RunPiece(*job, first, end, pieces);
    }
    lock.lock();
    if (ended) PieceEndedLocked(number, *job);
    // What only this job still kept ends here: not under the lock.
    lock.unlock();
    job.reset();
    lock.lock();
  }
  --working_;
  ended_.notify_all();
}

void Client::RunPiece(Job& job, size_t first, size_t end, std::vector<CopyPiece>& pieces) {
  for (size_t i = first; i < end; ++i) {
    uint8_t* slot = job.mapped->arena->base() + job.offsets[i];
    pieces.clear();
    if (job.layout == nullptr) {
      pieces.push_back({nullptr, slot, job.payload_bytes});
    } else {
      for (const kvtier_part& part : job.layout->parts) {
        auto* row = reinterpret_cast<uint8_t*>(part.base + job.blocks[i] * part.stride);
        for (uint64_t r = 0; r < part.rows; ++r, row += part.row_stride, slot += part.row_bytes) {
          if (job.kind == JobKind::kLoad) {
            pieces.push_back({row, slot, part.row_bytes});
          } else {
            pieces.push_back({slot, row, part.row_bytes});
          }
        }
      }
    }
    const uint64_t sum = copy_(pieces.data(), pieces.size());
    if (job.kind == JobKind::kStore) {
      job.sums[i] = sum;
      job.good[i] = KVTIER_GOOD;
    } else {
      job.good[i] = sum == job.sums[i] ? KVTIER_GOOD : KVTIER_BAD;
      job.sums[i] = sum;
    }
  }
}

void Client::PieceEndedLocked(int64_t number, Job& job) {
  --job.running;
  if (job.running == 0 && job.next == job.offsets.size() && job.again.empty()) EndLocked(number, job);
}

void Client::PutBackLocked(int64_t number, const std::shared_ptr<Job>& job, std::pair<size_t, size_t> piece) {
  if (job->abandoned) return PieceEndedLocked(number, *job);
  Lane& lane = LaneOf(*job);
  if (job->next == job->offsets.size() && job->again.empty()) lane.queue.emplace_front(number, job);
  job->again.push_back(piece);
  --job->running;
  lane.ready.notify_all();
}

void Client::EndLocked(int64_t number, Job& job) {
  job.ended = true;
  const uint64_t begun = job.abandoned ? 0 : job.offsets.size();
  const auto of = [&](uint8_t flag) { return begun == 0 ? 0 : static_cast<uint64_t>(std::ranges::count(job.good, flag)); };
  const uint64_t good = of(KVTIER_GOOD);
  switch (job.kind) {
    case JobKind::kLoad:
      counts_.loaded_blocks += good;
      counts_.loaded_bytes += good * job.payload_bytes;
      break;
    case JobKind::kStore:
      counts_.stored_blocks += good;
      counts_.stored_bytes += good * job.payload_bytes;
      break;
    case JobKind::kCheck:
      counts_.checked_blocks += begun;
      break;
  }
  counts_.bad_blocks += of(KVTIER_BAD);
  if (job.abandoned) jobs_.erase(number);
  ended_.notify_all();
}

std::shared_ptr<Job> Client::FindLocked(int64_t number) {
  const auto found = jobs_.find(number);
  if (found == jobs_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no job " + std::to_string(number) + "; it was taken or abandoned");
  return found->second;
}

bool Client::Wait(int64_t number, int64_t wait_us) {
  std::shared_ptr<Job> job;  // as in `Take`
  std::unique_lock lock(mutex_);
  job = FindLocked(number);
  if (wait_us > 0) {
    ++working_;
    ended_.wait_until(lock, After(wait_us), [&] { return job->ended || closing_; });
    --working_;
    if (closing_) ended_.notify_all();
  }
  return job->ended;
}

void Client::Take(int64_t number, uint64_t* sums, uint8_t* good, size_t count) {
  std::shared_ptr<Job> job;  // freed after the lock
  const std::lock_guard lock(mutex_);
  job = FindLocked(number);
  if (!job->ended) throw Failure(KVTIER_BUSY, "BUSY: job " + std::to_string(number) + " has not ended; wait for it");
  if (count != job->offsets.size()) {
    throw Failure(KVTIER_CONFIG, "CONFIG: job " + std::to_string(number) + " has " + std::to_string(job->offsets.size()) + " blocks");
  }
  if (sums != nullptr) std::ranges::copy(job->sums, sums);
  if (good != nullptr) std::ranges::copy(job->good, good);
  jobs_.erase(number);
}

bool Client::Abandon(int64_t number) {
  std::shared_ptr<Job> job;
  const std::lock_guard lock(mutex_);
  job = FindLocked(number);
  if (job->ended) {
    jobs_.erase(number);
    return true;
  }
  job->abandoned = true;
  if (job->next < job->offsets.size() || !job->again.empty()) {
    job->next = job->offsets.size();
    job->again.clear();
    Lane& lane = LaneOf(*job);
    std::erase_if(lane.queue, [number](const auto& entry) { return entry.first == number; });
  }
  if (job->running > 0) return false;
  EndLocked(number, *job);
  return true;
}

bool Client::Close(std::chrono::steady_clock::time_point until) {
  std::unique_lock lock(mutex_);
  closing_ = true;
  loads_.queue.clear();
  stores_.queue.clear();
  for (const auto& [number, mapped] : arenas_) {
    for (const auto& [device, arena] : mapped->devices) arena->Leave();
  }
  to_pin_.clear();
  pins_.notify_all();
  ended_.notify_all();
  loads_.ready.notify_all();
  stores_.ready.notify_all();
  const bool idle = ended_.wait_until(lock, until, [this] { return working_ == 0; });
  // What a GPU still does of a job uses what is here. What it holds back only, a look among it, is freed when it lets go.
  const bool used = std::ranges::any_of(hung_, [](const Hung& one) { return one.job != nullptr && !one.piece; });
  lock.unlock();
  for (Lane* lane : {&loads_, &stores_}) {
    for (std::thread& thread : lane->threads) {
      if (idle) {
        thread.join();
      } else {
        thread.detach();
      }
    }
    lane->threads.clear();
  }
  return idle && !used;
}

}  // namespace kvtier
