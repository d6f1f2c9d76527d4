// The receiving end of KV events: a ZeroMQ subscription whose messages are taken and decoded off the JavaScript thread, and
// handed over many at once.
//
//     publisher ──▶ libzmq's queue (bounded by its high-water mark) ──▶ Fill(), on one thread at a time ──▶ EventBurst
//
// Invariants: nothing is taken before somebody asks for it, so that memory is bounded by the queue's mark and two bursts: one that is used, and the next. The messages of
// a burst have sequence numbers that follow each other: whoever looks for gaps looks between bursts. A connection that ended is told no
// later than the first message of the next one.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zeromq.h"

namespace kvtier {

struct EventSource {
  std::string endpoint;
  std::string topic;
  int high_water_mark;
  int64_t max_message_bytes;
  bool ipv6;
  // How often the publisher's ZeroMQ is asked whether it is there; one that says nothing for twice as long is connected to anew.
  int heartbeat_ms;
  // Z85 text of 40 characters each; all empty: no CURVE.
  std::string server_key, public_key, secret_key;
};

// What batches become: words as DecodeKvEvents makes them, with the ids of tokens or without, or nothing.
struct EventForm {
  bool packed, tokens;
  std::span<const uint8_t> names;
};

struct EventBurst {
  static constexpr size_t kHead = 4;
  // Of each message: its sequence number (low word, high word), its place in `topics`, 1 when words of a batch follow, or 0: it is the
  // next of `payloads`.
  std::span<const int32_t> words;
  uint32_t messages = 0;
  std::vector<std::string> topics;
  std::vector<std::vector<uint8_t>> payloads;
  std::vector<uint8_t> last;  // the last message's payload in any case
  uint32_t foreign = 0;       // messages that are not of this protocol
  uint32_t disconnects = 0;
  uint32_t handshakes = 0;    // connections that were made
  bool connected = false;     // after all of these
  bool ended = false;
};

class KvEventReceiver {
 public:
  // Subscribes; the publisher may come later. Throws std::invalid_argument for an endpoint that cannot be, std::runtime_error for the rest.
  explicit KvEventReceiver(const EventSource& source);
  ~KvEventReceiver();
  KvEventReceiver(const KvEventReceiver&) = delete;
  KvEventReceiver& operator=(const KvEventReceiver&) = delete;

  // Waits for something to tell. The words stay until the next call. One thread at a time.
  EventBurst Fill(const EventForm& form);
  // From any thread: Fill returns, now and ever after.
  void End();

 private:
  void Close();
  static constexpr int kFrames = 3;

  bool Take(EventBurst& burst);
  void Add(EventBurst& burst, const EventForm& form);
  void Room(size_t words);
  void CountLinkEvents(EventBurst& burst);
  std::span<const uint8_t> BytesOf(int frame);

  const Zmq& zmq_;
  void* socket_ = nullptr;
  void* monitor_ = nullptr;
  int wake_ = -1;
  std::atomic<bool> ended_ = false;
  ZmqMessage frames_[kFrames];  // the message taken last
  ZmqMessage last_;             // the payload before it
  bool connected_ = false;
  bool held_ = false;           // the message taken last is of the next burst
  uint64_t seq_ = 0;            // its sequence number
  std::unique_ptr<int32_t[]> words_;
  size_t room_ = 0, count_ = 0;
};

}  // namespace kvtier
