// See peer_connection.h.
#include "peer_connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "object_header.h"

namespace kvtier {
namespace {

// Room for a whole frame of requests.
constexpr size_t kServerStashBytes = sizeof(PeerRequestFrame) + kPeerMaxRequests * sizeof(PeerRequest);
// Room for the next reply's head behind an object; what is read into it beyond is copied once more.
constexpr size_t kClientStashBytes = 512;
// One receive: it is checksummed while it is still in the (second-level) cache, where the next one's memory waits, too.
constexpr uint64_t kReceiveBytes = 128 << 10;
// One step of the checksum; meanwhile the memory that the next receive writes to is asked for.
constexpr uint64_t kHashBytes = 4 << 10;
// One turn of one connection, so that no connection starves its neighbours.
constexpr uint64_t kPeerTurnBytes = 4 << 20;
constexpr int kSendPieces = 64;
// For a client to prove itself.
constexpr auto kStrangerLimit = std::chrono::milliseconds(3000);

std::atomic<uint64_t> nextToken{1};

}  // namespace

PeerConnection::PeerConnection(PeerLoops& loops, uint64_t number, int fd, bool server,
                               std::vector<PeerEvent>& events)
    : loops_(loops), number_(number), fd_(fd), server_(server), events_(events),
      stash_(server ? kServerStashBytes : kClientStashBytes) {
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

PeerConnection::~PeerConnection() {
  if (fd_ >= 0) Close(PeerEnd::kEnded);
}

void PeerConnection::StartClient(const PeerSession& session, const PeerKey& key) {
  session_ = session;
  key_ = key;
  transport_ = loops_.tls() != nullptr ? loops_.tls()->Client(fd_, session, key) : PlainTransport(fd_);
}

void PeerConnection::StartServer() {
  transport_ = loops_.tls() != nullptr ? loops_.tls()->Server(fd_) : PlainTransport(fd_);
  state_ = State::kSecuring;
}

bool PeerConnection::wantsWrite() const {
  return state_ == State::kConnecting || !out_.empty() || (transport_ && transport_->WantsWrite());
}

void PeerConnection::OnReady(bool readable, bool writable) {
  if (state_ == State::kConnecting) {
    int error = 0;
    socklen_t bytes = sizeof(error);
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) return Close(PeerEnd::kEnded);
    if (!writable) return;
    state_ = State::kSecuring;
  }
  if (state_ == State::kSecuring) Advance();
  if (closed() || state_ == State::kSecuring) return;
  congestion_.Look(fd_);
  if (writable && transport_->WantsWrite() && !transport_->Flush()) return Close(PeerEnd::kEnded);
  if (writable && !out_.empty()) Write();
  if (!closed() && (readable || more_)) Read();
}

// The transport's own handshake; then the client speaks first.
void PeerConnection::Advance() {
  const ssize_t result = transport_->Handshake();
  if (result == kWait) return;
  if (result == kEnded) return Close(PeerEnd::kUnauthenticated);
  state_ = State::kHello;
  more_ = transport_->HasBuffered();
  if (server_) return;
  PeerHello hello;
  hello.session = session_;
  hello.nonce = clientNonce_ = RandomNonce();
  Send(&hello, sizeof(hello));
}

void PeerConnection::OnTick(PeerClock::time_point now) {
  const auto limit = std::chrono::milliseconds(loops_.options().stallMs);
  const bool waiting = state_ != State::kUp || !out_.empty() || !unreceived_.empty() || (server_ && stashed() > 0);
  if (waiting && now - lastProgress_ > limit) return Close(PeerEnd::kTimeLimit);
  // However little it sends, and whenever.
  if (server_ && !wasUp_ && now - began_ > std::min<PeerClock::duration>(limit, kStrangerLimit)) {
    return Close(PeerEnd::kTimeLimit);
  }
  for (const auto& [tag, fetch] : pending_) {
    if (now > fetch.deadline) return Close(PeerEnd::kTimeLimit);
  }
  Acknowledge();
}

// With the next requests, and at the latest with the next tick: it costs nothing then, and slots wait there meanwhile.
void PeerConnection::Acknowledge() {
  if (received_ == 0 || state_ != State::kUp) return;
  const PeerRequestFrame frame{kPeerReceivedMagic, received_};
  received_ = 0;
  Send(&frame, sizeof(frame));
}

void PeerConnection::Fetch(const std::vector<PeerFetch>& fetches) {
  const auto now = PeerClock::now();
  std::vector<uint8_t> bytes;
  for (size_t first = 0; first < fetches.size(); first += kPeerMaxRequests) {
    const size_t count = std::min<size_t>(kPeerMaxRequests, fetches.size() - first);
    const PeerRequestFrame frame{kPeerRequestMagic, static_cast<uint32_t>(count)};
    const size_t at = bytes.size();
    bytes.resize(at + sizeof(frame) + count * sizeof(PeerRequest));
    std::memcpy(bytes.data() + at, &frame, sizeof(frame));
    for (size_t i = 0; i < count; ++i) {
      const PeerFetch& fetch = fetches[first + i];
      const PeerRequest request{fetch.tag, fetch.slotBytes, fetch.identity};
      std::memcpy(bytes.data() + at + sizeof(frame) + i * sizeof(request), &request, sizeof(request));
      const auto deadline = now + std::chrono::milliseconds(fetch.limitMs);
      pending_[fetch.tag] = Pending{fetch.slot, fetch.slotBytes, deadline, fetch.identity};
    }
  }
  if (closed() || state_ != State::kUp) return Close(PeerEnd::kEnded);
  if (received_ > 0) {
    const PeerRequestFrame frame{kPeerReceivedMagic, received_};
    received_ = 0;
    bytes.insert(bytes.begin(), reinterpret_cast<const uint8_t*>(&frame), reinterpret_cast<const uint8_t*>(&frame + 1));
  }
  Send(bytes.data(), bytes.size());
}

void PeerConnection::Answer(const std::vector<PeerAnswerRow>& rows) {
  for (const auto& row : rows) {
    const auto asked = asked_.find(row.token);
    if (closed() || asked == asked_.end()) {  // it ended meanwhile
      if (row.status == PeerStatus::kReady) {
        events_.push_back({PeerEventKind::kSent, static_cast<double>(row.token), 0, 0, {}});
      }
      continue;
    }
    Out out;
    const bool ready = row.status == PeerStatus::kReady;
    const PeerReply reply{kPeerReplyMagic, static_cast<uint32_t>(row.status), asked->second,
                          ready ? row.objectBytes : 0};
    asked_.erase(asked);
    out.head.resize(sizeof(reply));
    std::memcpy(out.head.data(), &reply, sizeof(reply));
    if (ready) {
      out.body = loops_.arena().base() + row.slot;
      out.bodyBytes = row.objectBytes;
      out.token = row.token;
    }
    if (out_.empty()) lastProgress_ = PeerClock::now();
    out_.push_back(std::move(out));
  }
  if (!closed() && !out_.empty()) Write();
}

void PeerConnection::Close(PeerEnd why) {
  if (fd_ >= 0) {
    transport_.reset();
    // What the kernel still holds refers to slots that get other content now: it must not go out.
    const linger drop{1, 0};
    if (!out_.empty() || !unreceived_.empty()) setsockopt(fd_, SOL_SOCKET, SO_LINGER, &drop, sizeof(drop));
    else shutdown(fd_, SHUT_RDWR);
    close(fd_);
    fd_ = -1;
    more_ = false;
    if (!server_) {
      events_.push_back({PeerEventKind::kDown, static_cast<double>(number_), static_cast<double>(why), 0, {}});
    } else if (why != PeerEnd::kEnded) {
      events_.push_back({PeerEventKind::kRefused, static_cast<double>(number_), static_cast<double>(why), 0, {}});
    }
  }
  for (const auto& [tag, fetch] : pending_) {
    events_.push_back({PeerEventKind::kFetched, static_cast<double>(tag), static_cast<double>(PeerResult::kFailed), 0, {}});
  }
  pending_.clear();
  bodyBytes_ = 0;
  for (const uint64_t token : unreceived_) events_.push_back({PeerEventKind::kSent, static_cast<double>(token), 0, 0, {}});
  unreceived_.clear();
  for (const auto& out : out_) {
    if (out.token != 0) events_.push_back({PeerEventKind::kSent, static_cast<double>(out.token), 0, 0, {}});
  }
  out_.clear();
  asked_.clear();
}

void PeerConnection::Send(const void* bytes, size_t count) {
  Out out;
  out.head.assign(static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + count);
  if (out_.empty()) lastProgress_ = PeerClock::now();
  out_.push_back(std::move(out));
  Write();
}

// Large objects go out of the arena without a copy where the transport can; all else, and heads, in few gathered pieces.
void PeerConnection::Write() {
  const uint64_t before = sentBytes_;
  while (!out_.empty() && sentBytes_ - before < kPeerTurnBytes) {
    if (GoesByPages(out_.front()) && out_.front().doneBytes >= out_.front().head.size()) {
      if (!SendBody()) return;
      continue;
    }
    iovec pieces[kSendPieces];
    int count = 0;
    bool more = false;
    for (const Out& out : out_) {
      if (count + 2 > kSendPieces || more) break;
      const uint64_t headDone = std::min<uint64_t>(out.doneBytes, out.head.size());
      const uint64_t bodyDone = out.doneBytes - headDone;
      if (headDone < out.head.size()) {
        pieces[count++] = {const_cast<uint8_t*>(out.head.data()) + headDone, out.head.size() - headDone};
      }
      if (bodyDone == out.bodyBytes) continue;
      if (GoesByPages(out)) more = true;
      else pieces[count++] = {const_cast<uint8_t*>(out.body) + bodyDone, out.bodyBytes - bodyDone};
    }
    const ssize_t moved = transport_->Write(pieces, count, more);
    if (moved == kWait) return;
    if (moved == kEnded) return Close(PeerEnd::kEnded);
    Sent(static_cast<uint64_t>(moved));
  }
}

bool PeerConnection::GoesByPages(const Out& out) const {
  return out.bodyBytes >= PagePipe::kFromBytes && transport_->SendsPages();
}

// Of the first of `out_`, whose head is out. False: no more now, or closed.
bool PeerConnection::SendBody() {
  const Out& out = out_.front();
  const uint64_t bodyDone = out.doneBytes - out.head.size();
  const ssize_t moved = transport_->SendPages(out.body + bodyDone, out.bodyBytes - bodyDone);
  if (moved > 0) Sent(static_cast<uint64_t>(moved));
  if (moved == kEnded) Close(PeerEnd::kEnded);
  return moved > 0;
}

void PeerConnection::Sent(uint64_t bytes) {
  lastProgress_ = PeerClock::now();
  sentBytes_ += bytes;
  while (bytes > 0) {
    Out& out = out_.front();
    const uint64_t part = std::min(bytes, out.bytes() - out.doneBytes);
    out.doneBytes += part;
    bytes -= part;
    if (out.doneBytes < out.bytes()) return;
    if (out.token != 0) unreceived_.push_back(out.token);
    out_.pop_front();
  }
}

ssize_t PeerConnection::FillStash() {
  if (stashFrom_ > 0) {
    std::memmove(stash_.data(), stash(), stashed());
    stashTo_ -= stashFrom_;
    stashFrom_ = 0;
  }
  const iovec piece{stash_.data() + stashTo_, stash_.size() - stashTo_};
  const ssize_t moved = transport_->Read(&piece, 1);
  if (moved > 0) stashTo_ += static_cast<size_t>(moved);
  return moved;
}

void PeerConnection::Read() {
  uint64_t turnBytes = 0;
  more_ = false;
  for (;;) {
    ssize_t moved;
    if (bodyBytes_ > bodyDone_ && stashed() == 0) {
      stashFrom_ = stashTo_ = 0;
      const uint64_t wanted = std::min(bodyBytes_ - bodyDone_, kReceiveBytes);
      const bool last = wanted == bodyBytes_ - bodyDone_;
      const iovec pieces[2] = {{bodyAt_ + bodyDone_, wanted}, {stash_.data(), stash_.size()}};
      moved = transport_->Read(pieces, last ? 2 : 1);
      if (moved > 0) {
        const uint64_t placed = std::min(static_cast<uint64_t>(moved), wanted);
        stashTo_ = static_cast<size_t>(moved) - placed;
        TakeBody(bodyAt_ + bodyDone_, placed);
      }
    } else {
      moved = FillStash();
    }
    if (moved == kWait) return;
    if (moved == kEnded) return Close(state_ == State::kHello ? PeerEnd::kUnauthenticated : PeerEnd::kEnded);
    if (state_ == State::kUp && (bodyBytes_ > 0 || !server_)) lastProgress_ = PeerClock::now();
    Parse();
    if (closed()) return;
    turnBytes += static_cast<uint64_t>(moved);
    if (turnBytes >= kPeerTurnBytes) {
      more_ = transport_->HasBuffered();
      return;
    }
  }
}

// Consumes what the stash has whole pieces of.
void PeerConnection::Parse() {
  while (!closed()) {
    if (bodyBytes_ > bodyDone_) {
      const uint64_t count = std::min<uint64_t>(stashed(), bodyBytes_ - bodyDone_);
      if (count == 0) return;
      std::memcpy(bodyAt_ + bodyDone_, stash(), count);
      stashFrom_ += count;
      TakeBody(bodyAt_ + bodyDone_, count);
      continue;
    }
    const bool went = state_ == State::kHello ? ParseHello() : server_ ? ParseRequests() : ParseReply();
    if (!went) return;
  }
}

bool PeerConnection::ParseHello() {
  if (server_ && !answered_) {
    if (stashed() < sizeof(PeerHello)) {
      // Garbage is refused at its first bytes, not when a hello's worth has come.
      const size_t known = std::min(stashed(), kPeerMagic.size());
      if (std::memcmp(stash(), kPeerMagic.data(), known) != 0) Close(PeerEnd::kProtocol);
      return false;
    }
    PeerHello hello;
    std::memcpy(&hello, stash(), sizeof(hello));
    stashFrom_ += sizeof(hello);
    if (hello.magic != kPeerMagic || hello.version != kPeerVersion) return Close(PeerEnd::kProtocol), false;
    const auto key = loops_.sessions().Find(hello.session);
    if (!key) return Close(PeerEnd::kUnauthenticated), false;
    session_ = hello.session;
    key_ = *key;
    clientNonce_ = hello.nonce;
    PeerAnswer answer;
    answer.nonce = serverNonce_ = RandomNonce();
    answer.proof = PeerProof(key_, "server", session_, clientNonce_, serverNonce_);
    answered_ = true;
    Send(&answer, sizeof(answer));
    return !closed();
  }
  if (server_) {
    PeerKey proof;
    if (stashed() < sizeof(proof)) return false;
    std::memcpy(&proof, stash(), sizeof(proof));
    stashFrom_ += sizeof(proof);
    if (!SameProof(proof, PeerProof(key_, "client", session_, clientNonce_, serverNonce_))) {
      return Close(PeerEnd::kUnauthenticated), false;
    }
    Up();
    return true;
  }
  PeerAnswer answer;
  if (stashed() < sizeof(answer)) return false;
  std::memcpy(&answer, stash(), sizeof(answer));
  stashFrom_ += sizeof(answer);
  if (answer.magic != kPeerMagic || answer.version != kPeerVersion) return Close(PeerEnd::kProtocol), false;
  if (!SameProof(answer.proof, PeerProof(key_, "server", session_, clientNonce_, answer.nonce))) {
    return Close(PeerEnd::kUnauthenticated), false;
  }
  const PeerKey proof = PeerProof(key_, "client", session_, clientNonce_, answer.nonce);
  Send(proof.data(), proof.size());
  if (closed()) return false;
  Up();
  return true;
}

void PeerConnection::Up() {
  state_ = State::kUp;
  wasUp_ = true;
  if (server_ && ++loops_.proven > loops_.options().maxConnections) return Close(PeerEnd::kTooMany);
  lastProgress_ = PeerClock::now();
  if (!server_) events_.push_back({PeerEventKind::kUp, static_cast<double>(number_), 0, 0, {}});
}

bool PeerConnection::ParseRequests() {
  PeerRequestFrame frame;
  if (stashed() < sizeof(frame)) return false;
  std::memcpy(&frame, stash(), sizeof(frame));
  if (frame.magic == kPeerReceivedMagic && frame.count <= unreceived_.size()) {
    stashFrom_ += sizeof(frame);
    for (uint32_t i = 0; i < frame.count; ++i) {
      events_.push_back({PeerEventKind::kSent, static_cast<double>(unreceived_.front()), 1, 0, {}});
      unreceived_.pop_front();
    }
    lastProgress_ = PeerClock::now();
    return true;
  }
  if (frame.magic != kPeerRequestMagic || frame.count > kPeerMaxRequests ||
      asked_.size() + out_.size() + unreceived_.size() + frame.count > kPeerMaxRequests) {
    return Close(PeerEnd::kProtocol), false;
  }
  if (stashed() < sizeof(frame) + frame.count * sizeof(PeerRequest)) return false;
  stashFrom_ += sizeof(frame);
  for (uint32_t i = 0; i < frame.count; ++i) {
    PeerRequest request;
    std::memcpy(&request, stash(), sizeof(request));
    stashFrom_ += sizeof(request);
    if (request.slotBytes > (uint64_t{1} << 40)) return Close(PeerEnd::kProtocol), false;
    const uint64_t token = nextToken++;
    asked_.emplace(token, request.tag);
    events_.push_back({PeerEventKind::kRequest, static_cast<double>(token), static_cast<double>(number_),
                       static_cast<double>(request.slotBytes), request.identity});
  }
  lastProgress_ = PeerClock::now();
  return true;
}

bool PeerConnection::ParseReply() {
  PeerReply reply;
  if (stashed() < sizeof(reply)) return false;
  std::memcpy(&reply, stash(), sizeof(reply));
  const auto found = pending_.find(reply.tag);
  if (reply.magic != kPeerReplyMagic || found == pending_.end()) return Close(PeerEnd::kProtocol), false;
  const bool ready = reply.status == static_cast<uint32_t>(PeerStatus::kReady);
  if (ready ? reply.objectBytes < kHeaderBytes || reply.objectBytes > found->second.slotBytes : reply.objectBytes != 0) {
    return Close(PeerEnd::kProtocol), false;
  }
  stashFrom_ += sizeof(reply);
  if (ready) {
    bodyTag_ = reply.tag;
    bodyBytes_ = reply.objectBytes;
    bodyDone_ = 0;
    bodyAt_ = loops_.arena().base() + found->second.slot;
    const auto next = pending_.find(reply.tag + 1);
    nextAt_ = next == pending_.end() ? nullptr : loops_.arena().base() + next->second.slot;
    nextBytes_ = next == pending_.end() ? 0 : next->second.slotBytes;
    XXH3_64bits_reset(&checksum_);
    return true;
  }
  const auto result =
      reply.status == static_cast<uint32_t>(PeerStatus::kMissing) ? PeerResult::kMissing : PeerResult::kFailed;
  events_.push_back({PeerEventKind::kFetched, static_cast<double>(reply.tag), static_cast<double>(result), 0, {}});
  pending_.erase(found);
  return true;
}

// `count` bytes of the object have come to where they belong. The payload is checksummed while it is in the cache.
void PeerConnection::TakeBody(const uint8_t* bytes, uint64_t count) {
  const uint64_t before = bodyDone_;
  bodyDone_ += count;
  const uint64_t skip = before < kHeaderBytes ? std::min<uint64_t>(count, kHeaderBytes - before) : 0;
  for (uint64_t at = skip; at < count; at += kHashBytes) {
    WarmUp(bodyDone_ + at);
    XXH3_64bits_update(&checksum_, bytes + at, std::min(kHashBytes, count - at));
  }
  if (bodyDone_ == bodyBytes_) EndBody();
}

// Asks for the memory where the bytes from `offset` of the object will go, or of the one that was asked for after it, so that
// it comes while the checksum is being made: the kernel's copy out of the socket waits for it otherwise.
void PeerConnection::WarmUp(uint64_t offset) {
  const bool isInBody = offset < bodyBytes_;
  const uint64_t from = isInBody ? offset : offset - bodyBytes_;
  const uint64_t end = std::min(from + kHashBytes, isInBody ? bodyBytes_ : nextBytes_);
  const uint8_t* const base = isInBody ? bodyAt_ : nextAt_;
  for (uint64_t at = from; at < end; at += 64) __builtin_prefetch(base + at, 1, 3);
}

void PeerConnection::EndBody() {
  const auto found = pending_.find(bodyTag_);
  ObjectHeader header;
  const uint8_t* identity = found->second.identity.data();
  const HeaderFault fault = MatchHeader(bodyAt_, identity, identity + 32, &header);
  const bool sound = fault == HeaderFault::kNone && header.payloadBytes == bodyBytes_ - kHeaderBytes &&
                     header.payloadChecksum == XXH3_64bits_digest(&checksum_);
  // A newer peer's, which is of use to others: no word of damage goes back.
  const auto result = sound ? PeerResult::kReady : IsForeign(fault) ? PeerResult::kMissing : PeerResult::kCorrupt;
  events_.push_back({PeerEventKind::kFetched, static_cast<double>(bodyTag_), static_cast<double>(result), 0, {}});
  pending_.erase(found);
  bodyBytes_ = bodyDone_ = 0;
  ++received_;
}

}  // namespace kvtier
