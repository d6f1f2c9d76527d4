#include "kv_event_receiver.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "kv_events.h"

namespace kvtier {
namespace {

// What is told at once: so that the consumer's turn stays short.
constexpr uint32_t kMaxMessages = 256;
constexpr size_t kMaxBytes = 1 << 20;
constexpr size_t kMaxTopics = 16;
// Room for words that is kept from burst to burst; more is given back.
constexpr size_t kKeptWords = 1 << 20;
// That nobody has asked for yet; past them ZeroMQ's thread would wait. ZeroMQ connects again ten times a second at most.
constexpr int kMaxLinkEvents = 1'000'000;
constexpr uint64_t kMaxSafeInteger = (1ull << 53) - 1;

std::atomic<uint64_t> monitors = 0;

}  // namespace

KvEventReceiver::KvEventReceiver(const EventSource& source) : zmq_(Zmq::Library()) {
  for (auto& frame : frames_) zmq_.msg_init(&frame);
  zmq_.msg_init(&last_);
  const auto require = [&](bool holds, const char* what) {
    if (holds) return;
    const std::string reason = std::string(what) + ": " + zmq_.strerror(zmq_.errnum());
    Close();
    throw std::runtime_error(reason);
  };
  void* const context = Zmq::Context();  // the first that may throw
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  require(wake_ >= 0, "eventfd");
  socket_ = zmq_.socket(context, Zmq::kSub);
  require(socket_ != nullptr, "socket");
  const auto set = [&](int option, const auto& value) { require(zmq_.setsockopt(socket_, option, &value, sizeof value) == 0, "option"); };
  const auto setText = [&](int option, const std::string& text, size_t bytes) {
    require(zmq_.setsockopt(socket_, option, text.c_str(), bytes) == 0, "option");
  };
  set(Zmq::kLinger, 0);
  set(Zmq::kReceiveHighWaterMark, source.high_water_mark);
  set(Zmq::kMaxMessageBytes, source.max_message_bytes);
  set(Zmq::kIpv6, source.ipv6 ? 1 : 0);
  set(Zmq::kHeartbeatInterval, source.heartbeat_ms);
  set(Zmq::kHeartbeatTimeout, 2 * source.heartbeat_ms);
  if (!source.server_key.empty()) {
    setText(Zmq::kCurveServerKey, source.server_key, source.server_key.size() + 1);
    setText(Zmq::kCurvePublicKey, source.public_key, source.public_key.size() + 1);
    setText(Zmq::kCurveSecretKey, source.secret_key, source.secret_key.size() + 1);
  }
  setText(Zmq::kSubscribe, source.topic, source.topic.size());
  const std::string watch = "inproc://kvtier-monitor-" + std::to_string(monitors++);
  constexpr int kWatched = Zmq::kEventDisconnected | Zmq::kEventHandshake;
  require(zmq_.Whole([&] { return zmq_.socket_monitor(socket_, watch.c_str(), kWatched); }) == 0, "monitor");
  monitor_ = zmq_.socket(Zmq::Context(), Zmq::kPair);
  require(monitor_ != nullptr, "monitor");
  const int linger = 0;
  require(zmq_.setsockopt(monitor_, Zmq::kLinger, &linger, sizeof linger) == 0 &&
              zmq_.setsockopt(monitor_, Zmq::kReceiveHighWaterMark, &kMaxLinkEvents, sizeof kMaxLinkEvents) == 0 &&
              zmq_.Whole([&] { return zmq_.connect(monitor_, watch.c_str()); }) == 0,
          "monitor");
  if (zmq_.Whole([&] { return zmq_.connect(socket_, source.endpoint.c_str()); }) != 0) {
    const std::string reason = zmq_.strerror(zmq_.errnum());
    Close();
    throw std::invalid_argument(reason);
  }
}

KvEventReceiver::~KvEventReceiver() {
  for (auto& frame : frames_) zmq_.msg_close(&frame);
  zmq_.msg_close(&last_);
  Close();
}

void KvEventReceiver::Close() {
  // Whom it tells must be there for as long as the monitor lives: it waits for it, and with it all that its thread does.
  if (socket_ != nullptr) zmq_.Whole([&] { return zmq_.socket_monitor(socket_, nullptr, 0); });
  if (monitor_ != nullptr) zmq_.close(monitor_);
  if (socket_ != nullptr) zmq_.close(socket_);
  if (wake_ >= 0) ::close(wake_);
}

void KvEventReceiver::End() {
  ended_ = true;
  eventfd_write(wake_, 1);
}

EventBurst KvEventReceiver::Fill(const EventForm& form) {
  EventBurst burst;
  count_ = 0;
  if (room_ > kKeptWords) {
    words_.reset();
    room_ = 0;
  }
  size_t bytes = 0;
  for (;;) {
    if (ended_) {
      burst.ended = true;
      return burst;
    }
    while (burst.messages < kMaxMessages && bytes < kMaxBytes) {
      const uint64_t before = seq_;
      if (!held_ && !Take(burst)) break;
      // What does not follow begins a burst of its own; so does one topic too many.
      held_ = burst.messages > 0 && (seq_ != before + 1 || burst.topics.size() == kMaxTopics);
      if (held_) break;
      bytes += BytesOf(2).size();
      Add(burst, form);
    }
    CountLinkEvents(burst);  // after the taking: see the third invariant
    if (burst.messages > 0 || burst.foreign > 0 || burst.disconnects > 0 || burst.handshakes > 0) break;
    ZmqPollItem items[] = {{socket_, 0, Zmq::kPollIn, 0}, {monitor_, 0, Zmq::kPollIn, 0}, {nullptr, wake_, Zmq::kPollIn, 0}};
    if (zmq_.Whole([&] { return zmq_.poll(items, 3, -1); }) < 0) throw std::runtime_error(zmq_.strerror(zmq_.errnum()));
  }
  if (burst.messages > 0) {
    const auto* data = static_cast<const uint8_t*>(zmq_.msg_data(&last_));
    burst.last.assign(data, data + zmq_.msg_size(&last_));
  }
  burst.connected = connected_;
  burst.words = {words_.get(), count_};
  return burst;
}

// The next message of this protocol, if one has come.
bool KvEventReceiver::Take(EventBurst& burst) {
  for (uint32_t foreign = 0; foreign < kMaxMessages; ++foreign) {
    int frames = 0;
    bool more = true;
    for (; more; ++frames) {
      ZmqMessage beyond;
      zmq_.msg_init(&beyond);
      ZmqMessage* frame = frames < kFrames ? &frames_[frames] : &beyond;
      if (zmq_.Whole([&] { return zmq_.msg_recv(frame, socket_, Zmq::kDontWait); }) < 0) {
        zmq_.msg_close(&beyond);
        if (zmq_.errnum() == EAGAIN) return false;  // before the first frame only: messages come whole
        throw std::runtime_error(zmq_.strerror(zmq_.errnum()));
      }
      more = zmq_.msg_more(frame) != 0;
      zmq_.msg_close(&beyond);
    }
    if (frames == kFrames && BytesOf(1).size() == 8) {
      uint64_t seq;
      memcpy(&seq, BytesOf(1).data(), sizeof seq);
      seq_ = __builtin_bswap64(seq);
      if (seq_ <= kMaxSafeInteger) return true;
    }
    ++burst.foreign;
  }
  return false;
}

void KvEventReceiver::Add(EventBurst& burst, const EventForm& form) {
  const auto bytes = BytesOf(0);
  const std::string_view topic(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  auto place = std::find(burst.topics.begin(), burst.topics.end(), topic);
  if (place == burst.topics.end()) place = burst.topics.emplace(place, topic);
  const auto payload = BytesOf(2);
  int64_t decoded = form.packed ? 0 : -1;
  Room(EventBurst::kHead);
  while (decoded == 0) {
    const size_t from = count_ + EventBurst::kHead;
    decoded = DecodeKvEvents(payload, form.tokens, form.names, {words_.get() + from, room_ - from});
    if (decoded == 0) Room(2 * (room_ - count_));
  }
  int32_t* head = words_.get() + count_;
  head[0] = static_cast<int32_t>(seq_);
  head[1] = static_cast<int32_t>(seq_ >> 32);
  head[2] = static_cast<int32_t>(place - burst.topics.begin());
  head[3] = decoded > 0 ? 1 : 0;
  count_ += EventBurst::kHead + static_cast<size_t>(std::max<int64_t>(decoded, 0));
  if (decoded < 0) burst.payloads.emplace_back(payload.begin(), payload.end());
  ++burst.messages;
  zmq_.msg_move(&last_, &frames_[2]);
}

// So many words after those that there are.
void KvEventReceiver::Room(size_t words) {
  if (room_ - count_ < words) {
    const size_t room = std::max<size_t>(count_ + words, std::max<size_t>(2 * room_, 4096));
    auto grown = std::make_unique_for_overwrite<int32_t[]>(room);
    if (count_ > 0) memcpy(grown.get(), words_.get(), count_ * sizeof(int32_t));
    words_ = std::move(grown);
    room_ = room;
  }
}

void KvEventReceiver::CountLinkEvents(EventBurst& burst) {
  ZmqMessage part;
  zmq_.msg_init(&part);
  // Each is two frames: what happened, and where.
  for (int i = 0; i < 2 * kMaxLinkEvents; ++i) {
    if (zmq_.Whole([&] { return zmq_.msg_recv(&part, monitor_, Zmq::kDontWait); }) < 0) break;
    if (zmq_.msg_more(&part) == 0 || zmq_.msg_size(&part) < sizeof(uint16_t)) continue;
    uint16_t happened;
    memcpy(&happened, zmq_.msg_data(&part), sizeof happened);
    connected_ = happened == Zmq::kEventHandshake;
    ++(connected_ ? burst.handshakes : burst.disconnects);
  }
  zmq_.msg_close(&part);
}

std::span<const uint8_t> KvEventReceiver::BytesOf(int frame) {
  return {static_cast<const uint8_t*>(zmq_.msg_data(&frames_[frame])), zmq_.msg_size(&frames_[frame])};
}

}  // namespace kvtier
