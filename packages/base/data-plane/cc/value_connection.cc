// See value_connection.h.
#include "value_connection.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "object_header.h"

namespace kvtier {
namespace {

constexpr std::string_view kSetTail = "\r\n$2\r\nXX\r\n";
constexpr size_t kLongestLine = 4096;
// What a server reads into a buffer of its own: PROTO_MBULK_BIG_ARG.
constexpr uint64_t kLargeValue = 32 << 10;
// Of one turn, so that connections take turns.
constexpr uint64_t kValueTurnBytes = 1 << 20;
constexpr size_t kVectors = 12;

void AppendWord(std::string& text, std::string_view word) {
  text.append("$").append(std::to_string(word.size())).append("\r\n").append(word).append("\r\n");
}

}  // namespace

ValueConnection::ValueConnection(Arena& arena, uint64_t number, int fd, std::shared_ptr<ValueQueue> queue,
                               std::vector<ValueEvent>& events)
    : arena_(arena), number_(number), fd_(fd), queue_(std::move(queue)), server_(queue_->server()), events_(events),
      logins_(server_.loginReplies) {
  XXH3_64bits_reset(&checksum_);  // the first piece of a value may be missing, and its second arrive
}

void ValueConnection::OnReady(bool readable, bool writable) {
  if (connecting_ && (readable || writable)) Connected();
  if (!closed()) congestion_.Look(fd_);
  if (!closed() && readable) Read();
  if (!closed() && writable) Write();
}

void ValueConnection::Connected() {
  int error = 0;
  socklen_t bytes = sizeof(error);
  getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) return Close(std::string("connect: ") + std::strerror(error));
  connecting_ = false;
  if (logins_ == 0) events_.push_back({ValueEventKind::kReady, static_cast<double>(number_), {}, {}});
  else out_.push_back({server_.login});
  Serve();
}

void ValueConnection::Serve() {
  Pump();
  Write();
}

bool ValueConnection::Carries(uint64_t tag) const {
  return std::ranges::any_of(values_, [tag](const MovedValue& value) { return value.group->what.tag == tag; });
}

// Commands, up to the depth.
void ValueConnection::Pump() {
  while (!closed() && !connecting_ && logins_ == 0 && !held_ && pieces_.size() < server_.depth) {
    if (sending_ == values_.size()) {
      auto next = queue_->Next(this);
      if (!next) return;
      values_.push_back(std::move(*next));
    }
    MovedValue& value = values_[sending_];
    if (!value.allSent()) SendPiece(value);
    if (value.allSent()) ++sending_;
  }
}

void ValueConnection::SendPiece(MovedValue& value) {
  const ValueMove& move = value.move();
  const bool isGet = value.isGet();
  const uint64_t part = value.sentBytes / move.partBytes;
  const uint64_t start = value.sentBytes % move.partBytes;
  const uint64_t partBytes = std::min(move.partBytes, move.bytes - part * move.partBytes);
  const uint64_t left = partBytes - start;
  // Pieces of about one size: a small one at the end would cost as much as a large one.
  const uint64_t pieces = std::max<uint64_t>(1, (left + queue_->pieceBytes() / 2) / queue_->pieceBytes());
  const uint64_t count = isGet ? (left + pieces - 1) / pieces : left;
  std::string text = "*4\r\n";
  AppendWord(text, isGet ? "GETRANGE" : "SET");
  AppendWord(text, move.keys + std::to_string(part));
  value.begun = true;
  if (isGet) {
    // To the end whatever it is: more than is expected must not go unnoticed.
    const bool isLast = start + count == partBytes;
    AppendWord(text, std::to_string(start));
    AppendWord(text, isLast ? "-1" : std::to_string(start + count - 1));
    if (!out_.empty() && out_.back().body == nullptr && out_.back().doneBytes == 0) out_.back().head += text;
    else out_.push_back({std::move(text)});
  } else {
    text.append("$").append(std::to_string(count)).append("\r\n");
    out_.push_back({std::move(text)});
    Out bytes{{}, arena_.base() + move.slot + value.sentBytes, count};
    if (pieces_.empty() || count < kLargeValue) out_.push_back(std::move(bytes));
    else held_ = std::move(bytes);
  }
  pieces_.push_back({value.sentBytes, count});
  value.sentBytes += count;
  ++value.open;
}

uint64_t ValueConnection::Out::bytes() const {
  return head.size() + (body == nullptr ? 0 : bodyBytes + kSetTail.size());
}

// Large values go out of the arena without a copy; all else in few gathered pieces.
void ValueConnection::Write() {
  while (!closed() && !connecting_ && !out_.empty()) {
    if (GoesByPages(out_.front()) && out_.front().doneBytes >= out_.front().head.size()) {
      if (!SendBody()) return;
      continue;
    }
    iovec vectors[kVectors];
    size_t used = 0;
    bool more = false;
    for (auto out = out_.begin(); out != out_.end() && used + 3 <= kVectors && !more; ++out) {
      uint64_t skip = out->doneBytes;
      const auto add = [&](const void* bytes, uint64_t count) {
        const uint64_t skipped = std::min(skip, count);
        skip -= skipped;
        if (count == skipped) return;
        vectors[used++] = {static_cast<uint8_t*>(const_cast<void*>(bytes)) + skipped, count - skipped};
      };
      add(out->head.data(), out->head.size());
      if (out->body == nullptr) continue;
      more = GoesByPages(*out);
      if (more) break;
      add(out->body, out->bodyBytes);
      add(kSetTail.data(), kSetTail.size());
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = used;
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR) return;
      return Close(std::string("send: ") + std::strerror(errno));
    }
    Sent(static_cast<uint64_t>(sent));
  }
}

bool ValueConnection::GoesByPages(const Out& out) const {
  return out.body != nullptr && out.bodyBytes >= PagePipe::kFromBytes && out.doneBytes < out.head.size() + out.bodyBytes &&
         pages_.usable();
}

// Of the first of `out_`, whose head is out. False: no more now, or closed.
bool ValueConnection::SendBody() {
  const Out& out = out_.front();
  const uint64_t done = out.doneBytes - out.head.size();
  const ssize_t moved = pages_.Send(fd_, out.body + done, out.bodyBytes - done, true);  // its tail follows
  if (moved > 0) Sent(static_cast<uint64_t>(moved));
  if (moved == kEnded) Close(std::string("send: ") + std::strerror(errno));
  return moved > 0 || (moved == kWait && !pages_.usable());
}

void ValueConnection::Sent(uint64_t bytes) {
  while (bytes > 0) {
    Out& out = out_.front();
    const uint64_t taken = std::min(out.bytes() - out.doneBytes, bytes);
    out.doneBytes += taken;
    bytes -= taken;
    if (out.doneBytes == out.bytes()) out_.pop_front();
  }
}

void ValueConnection::Read() {
  for (uint64_t turnBytes = 0; !closed() && turnBytes < kValueTurnBytes;) {
    uint8_t dropped[16 << 10];
    iovec vectors[2];
    size_t used = 0;
    const uint64_t wanted =
        bodyLeft_ == 0 ? 0 : bodyAt_ != nullptr ? bodyLeft_ : std::min<uint64_t>(bodyLeft_, sizeof(dropped));
    if (wanted > 0) vectors[used++] = {bodyAt_ != nullptr ? bodyAt_ : dropped, wanted};
    const bool withStash = wanted == bodyLeft_;
    if (withStash) vectors[used++] = {stash_.data() + stashed_, stash_.size() - stashed_};
    const ssize_t count = readv(fd_, vectors, static_cast<int>(used));
    if (count < 0) {
      if (errno == EAGAIN || errno == EINTR) return;
      return Close(std::string("read: ") + std::strerror(errno));
    }
    if (count == 0) return Close("the server closed the connection");
    const auto got = static_cast<uint64_t>(count);
    turnBytes += got;
    if (wanted > 0) Filled(std::min(got, wanted));
    if (got > wanted) stashed_ += got - wanted;
    Parse();
    if (closed()) return;
    Pump();
    Write();
    // Less than there was room for: there is no more now.
    uint64_t room = 0;
    for (size_t i = 0; i < used; ++i) room += vectors[i].iov_len;
    if (got < room) return;
  }
}

// `bytes` more of the value are in place.
void ValueConnection::Filled(uint64_t bytes) {
  bodyLeft_ -= bytes;
  if (bodyAt_ != nullptr) {
    const uint64_t at = pieces_.front().at + (pieces_.front().bytes - bodyLeft_ - bytes);
    const uint64_t skip = at < kHeaderBytes ? std::min<uint64_t>(kHeaderBytes - at, bytes) : 0;
    if (at == 0) XXH3_64bits_reset(&checksum_);
    XXH3_64bits_update(&checksum_, bodyAt_ + skip, bytes - skip);
    bodyAt_ += bytes;
  }
  if (bodyLeft_ == 0) tailLeft_ = 2;
}

void ValueConnection::Parse() {
  size_t from = 0;
  while (from < stashed_ && !closed()) {
    if (tailLeft_ > 0) {
      if (stash_[from++] != (tailLeft_ == 2 ? '\r' : '\n')) return Close("the server sent something that is not RESP2");
      if (--tailLeft_ == 0) EndPiece(bodyIs_);
    } else if (bodyLeft_ > 0) {
      const uint64_t bytes = std::min<uint64_t>(bodyLeft_, stashed_ - from);
      if (bodyAt_ != nullptr) std::memcpy(bodyAt_, stash_.data() + from, bytes);
      from += bytes;
      Filled(bytes);
    } else {
      const auto* begin = stash_.data() + from;
      const auto* end = static_cast<const char*>(std::memchr(begin, '\n', stashed_ - from));
      const size_t count = end == nullptr ? stashed_ - from : static_cast<size_t>(end - begin);
      line_.append(begin, count);
      if (line_.size() > kLongestLine) return Close("the server sent a line without an end");
      from += count + (end != nullptr);
      if (end == nullptr) break;
      if (!line_.empty() && line_.back() == '\r') line_.pop_back();
      const std::string line = std::move(line_);
      line_.clear();
      if (!ParseLine(line.data(), line.size())) return;
    }
  }
  std::memmove(stash_.data(), stash_.data() + from, stashed_ - from);
  stashed_ -= from;
}

// False when the connection is closed.
bool ValueConnection::ParseLine(const char* text, size_t count) {
  const std::string_view line(text, count);
  if (logins_ > 0) {
    if (line != "+OK") return Close(std::string(line.substr(line.empty() ? 0 : 1))), false;
    if (--logins_ == 0) events_.push_back({ValueEventKind::kReady, static_cast<double>(number_), {}, {}});
    return true;
  }
  if (pieces_.empty()) return Close("the server sent what nobody asked for: " + std::string(line.substr(0, 80))), false;
  const bool isGet = values_.front().isGet();
  if (line.starts_with('-')) EndPiece(MoveResult::kError, std::string(line.substr(1)));
  else if (line == "+OK" && !isGet) EndPiece(MoveResult::kOk);
  else if (line == "$-1") EndPiece(MoveResult::kNone);
  else if (line.starts_with('$') && isGet) {
    uint64_t bytes = 0;
    const auto [end, error] = std::from_chars(text + 1, text + count, bytes);
    if (error != std::errc() || end != text + count) return Close("not a length: " + std::string(line)), false;
    BeginBody(bytes);
  } else return Close("the server sent something that is not RESP2: " + std::string(line.substr(0, 40))), false;
  return !closed();
}

void ValueConnection::BeginBody(uint64_t bytes) {
  const Piece& piece = pieces_.front();
  const bool isWanted = bytes == piece.bytes && bytes > 0;
  // GETRANGE answers "" when there is no such key.
  bodyIs_ = isWanted ? MoveResult::kOk : bytes == 0 ? MoveResult::kNone : MoveResult::kLength;
  bodyAt_ = isWanted ? arena_.base() + values_.front().move().slot + piece.at : nullptr;
  bodyLeft_ = bytes;
  if (bytes == 0) tailLeft_ = 2;
}

void ValueConnection::EndPiece(MoveResult result, std::string text) {
  MovedValue& value = values_.front();
  const uint64_t bytes = pieces_.front().bytes;
  pieces_.pop_front();
  if (value.isGet()) queue_->Arrived(bytes, !pieces_.empty());
  if (held_ && pieces_.size() == 1) {
    out_.push_back(std::move(*held_));
    held_.reset();
  }
  --value.open;
  // A value that is too short has pieces that are not there: the worst counts.
  if (value.result == MoveResult::kOk || result == MoveResult::kLength) {
    value.result = result;
    value.text = std::move(text);
  }
  EndValues();
}

void ValueConnection::EndValues() {
  while (!values_.empty() && values_.front().open == 0 && values_.front().allSent()) {
    MovedValue& value = values_.front();
    const bool isWhole = value.result == MoveResult::kOk && value.isGet();
    queue_->End(value, isWhole ? Verified(value) : value.result);
    values_.pop_front();
    if (sending_ > 0) --sending_;
  }
}

MoveResult ValueConnection::Verified(const MovedValue& value) {
  ObjectHeader header;
  const uint8_t* identity = value.move().identity.data();
  const HeaderFault fault = MatchHeader(arena_.base() + value.move().slot, identity, identity + 32, &header);
  if (IsForeign(fault)) return MoveResult::kForeign;
  const bool isSound = fault == HeaderFault::kNone && header.payloadBytes == value.move().bytes - kHeaderBytes &&
                       XXH3_64bits_digest(&checksum_) == header.payloadChecksum;
  return isSound ? MoveResult::kOk : MoveResult::kFault;
}

void ValueConnection::Close(const std::string& why) {
  if (closed()) return;
  End();
  events_.push_back({ValueEventKind::kDown, static_cast<double>(number_), {}, why});
}

void ValueConnection::End() {
  if (closed()) return;
  // What the kernel still holds refers to slots that get other content now: it must not go out.
  const linger drop{1, 0};
  if (!values_.empty()) setsockopt(fd_, SOL_SOCKET, SO_LINGER, &drop, sizeof(drop));
  close(fd_);
  fd_ = -1;
  for (const MovedValue& value : values_) queue_->End(value, MoveResult::kLost);
  values_.clear();
}

}  // namespace kvtier
