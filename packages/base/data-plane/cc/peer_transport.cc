// See peer_transport.h. OpenSSL is linked statically and hidden: node has its own, of another version.
#include "peer_transport.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace kvtier {
namespace {

class Plain : public PeerTransport {
 public:
  explicit Plain(int fd) : fd_(fd) {}
  ssize_t Handshake() override { return 1; }
  ssize_t Read(const iovec* pieces, int count) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t moved = recvmsg(fd_, &message, MSG_DONTWAIT);
    if (moved > 0) return moved;
    return moved < 0 && (errno == EAGAIN || errno == EINTR) ? kWait : kEnded;
  }
  ssize_t Write(const iovec* pieces, int count, bool more) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t moved = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (moved > 0) return moved;
    return moved < 0 && (errno == EAGAIN || errno == EINTR) ? kWait : kEnded;
  }

  bool SendsPages() const override { return pages_.usable(); }
  ssize_t SendPages(const uint8_t* at, uint64_t bytes) override { return pages_.Send(fd_, at, bytes); }

 private:
  int fd_;
  PagePipe pages_;
};

// Of one call to Write, so that connections take turns.
constexpr ssize_t kWriteBytes = 1 << 20;

// TLS_AES_128_GCM_SHA256: the one that every CPU of this kind has instructions for.
constexpr unsigned char kCipher[2] = {0x13, 0x01};

struct ClientIdentity {
  PeerSession session;
  PeerKey key;
};
int ClientIdentityIndex() {
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}
int SessionsIndex() {
  static const int index = SSL_CTX_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

SSL_SESSION* SessionOf(SSL* ssl, const PeerKey& key) {
  SSL_SESSION* session = SSL_SESSION_new();
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipher);
  if (session != nullptr && cipher != nullptr && SSL_SESSION_set1_master_key(session, key.data(), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, cipher) == 1 && SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
    return session;
  }
  SSL_SESSION_free(session);
  return nullptr;
}

int UseSession(SSL* ssl, const EVP_MD* digest, const unsigned char** id, size_t* idBytes, SSL_SESSION** session) {
  const auto* identity = static_cast<const ClientIdentity*>(SSL_get_ex_data(ssl, ClientIdentityIndex()));
  *id = nullptr;
  *idBytes = 0;
  *session = nullptr;
  if (identity == nullptr || (digest != nullptr && EVP_MD_get_type(digest) != NID_sha256)) return 0;
  *session = SessionOf(ssl, identity->key);
  if (*session == nullptr) return 0;
  *id = identity->session.data();
  *idBytes = identity->session.size();
  return 1;
}

int FindSession(SSL* ssl, const unsigned char* id, size_t idBytes, SSL_SESSION** session) {
  *session = nullptr;
  const auto* sessions =
      static_cast<const PeerSessions*>(SSL_CTX_get_ex_data(SSL_get_SSL_CTX(ssl), SessionsIndex()));
  PeerSession wanted;
  if (idBytes != wanted.size()) return 1;
  std::memcpy(wanted.data(), id, idBytes);
  const auto key = sessions->Find(wanted);
  if (key) *session = SessionOf(ssl, *key);
  return 1;
}

// Where OpenSSL puts the records that it made: each alone would be a system call, and a segment a quarter full.
class RecordBatch {
 public:
  explicit RecordBatch(int fd) : fd_(fd), bytes_(std::make_unique<uint8_t[]>(kBatchBytes)) {}

  // Sends what waits, as far as the socket takes it.
  void Flush() {
    while (from_ < to_ && !ended_) {
      const ssize_t moved = send(fd_, bytes_.get() + from_, to_ - from_, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (moved > 0) from_ += static_cast<size_t>(moved);
      else if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return;
      else ended_ = true;
    }
    if (from_ == to_) from_ = to_ = 0;
  }
  bool waits() const { return from_ < to_; }
  bool ended() const { return ended_; }

  // For OpenSSL, which writes to it as to any BIO.
  static BIO* Open(RecordBatch* batch) {
    BIO* bio = BIO_new(Method());
    if (bio == nullptr) return nullptr;
    BIO_set_data(bio, batch);
    BIO_set_init(bio, 1);
    return bio;
  }

 private:
  // Eight full records.
  static constexpr size_t kBatchBytes = 8 * (SSL3_RT_MAX_PLAIN_LENGTH + SSL3_RT_HEADER_LENGTH + 17);

  static const BIO_METHOD* Method() {
    static BIO_METHOD* const method = [] {
      BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "records of peers");
      BIO_meth_set_write(made, Take);
      BIO_meth_set_ctrl(made, [](BIO*, int what, long, void*) -> long { return what == BIO_CTRL_FLUSH ? 1 : 0; });
      return made;
    }();
    return method;
  }

  static int Take(BIO* bio, const char* bytes, int count) {
    auto* batch = static_cast<RecordBatch*>(BIO_get_data(bio));
    const auto wanted = static_cast<size_t>(count);
    BIO_clear_retry_flags(bio);
    if (batch->to_ + wanted > kBatchBytes) batch->Flush();
    if (batch->ended_) return -1;
    const size_t taken = std::min(wanted, kBatchBytes - batch->to_);
    if (taken == 0) {
      BIO_set_retry_write(bio);
      return -1;
    }
    std::memcpy(batch->bytes_.get() + batch->to_, bytes, taken);
    batch->to_ += taken;
    return static_cast<int>(taken);
  }

  const int fd_;
  const std::unique_ptr<uint8_t[]> bytes_;
  size_t from_ = 0;
  size_t to_ = 0;
  bool ended_ = false;
};

class Tls : public PeerTransport {
 public:
  Tls(SSL_CTX* context, int fd, bool server, std::optional<ClientIdentity> identity)
      : batch_(fd), ssl_(SSL_new(context)), identity_(identity) {
    BIO* const out = RecordBatch::Open(&batch_);
    if (ssl_ == nullptr || out == nullptr || SSL_set_rfd(ssl_, fd) != 1) {
      throw std::runtime_error("SETUP: OpenSSL has no memory");
    }
    SSL_set0_wbio(ssl_, out);
    if (server) {
      SSL_set_accept_state(ssl_);
    } else {
      SSL_set_ex_data(ssl_, ClientIdentityIndex(), &*identity_);
      SSL_set_connect_state(ssl_);
    }
  }
  ~Tls() override { SSL_free(ssl_); }
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  ssize_t Handshake() override {
    const ssize_t result = Moved(SSL_do_handshake(ssl_));
    Flush();
    // Without the pre-shared key there is no peer, whatever certificate it shows.
    if (result > 0 && SSL_session_reused(ssl_) != 1) return kEnded;
    return result;
  }
  ssize_t Read(const iovec* pieces, int) override {
    return Moved(SSL_read(ssl_, pieces[0].iov_base, static_cast<int>(std::min<size_t>(pieces[0].iov_len, INT_MAX))));
  }
  ssize_t Write(const iovec* pieces, int count, bool) override {
    ssize_t total = 0;
    for (int i = 0; i < count && total < kWriteBytes; ++i) {
      const auto bytes = static_cast<int>(std::min<size_t>(pieces[i].iov_len, kWriteBytes));
      for (int done = 0; done < bytes && total < kWriteBytes;) {
        const ssize_t moved = Moved(SSL_write(ssl_, static_cast<uint8_t*>(pieces[i].iov_base) + done, bytes - done));
        if (moved <= 0) return total > 0 && moved == kWait ? total : moved;
        done += static_cast<int>(moved);
        total += moved;
      }
    }
    return Flush() ? total : kEnded;
  }
  bool Flush() override {
    batch_.Flush();
    return !batch_.ended();
  }
  bool HasBuffered() const override { return SSL_has_pending(ssl_) == 1; }
  bool WantsWrite() const override { return batch_.waits() || SSL_want_write(ssl_); }

 private:
  ssize_t Moved(int result) {
    if (result > 0) return result;
    const int error = SSL_get_error(ssl_, result);
    ERR_clear_error();
    return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? kWait : kEnded;
  }
  RecordBatch batch_;
  SSL* ssl_;
  std::optional<ClientIdentity> identity_;
};

}  // namespace

std::unique_ptr<PeerTransport> PlainTransport(int fd) { return std::make_unique<Plain>(fd); }

struct PeerTls::Contexts {
  SSL_CTX* server = nullptr;
  SSL_CTX* client = nullptr;
  ~Contexts() {
    SSL_CTX_free(server);
    SSL_CTX_free(client);
  }
};

PeerTls::PeerTls(const PeerSessions* sessions) : contexts_(std::make_unique<Contexts>()) {
  OPENSSL_init_ssl(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
  contexts_->server = SSL_CTX_new(TLS_server_method());
  contexts_->client = SSL_CTX_new(TLS_client_method());
  for (SSL_CTX* context : {contexts_->server, contexts_->client}) {
    if (context == nullptr || SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") != 1) {
      throw std::runtime_error("SETUP: this build of OpenSSL has no TLS 1.3 with AES-128-GCM");
    }
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, 128 << 10);
  }
  SSL_CTX_set_verify(contexts_->client, SSL_VERIFY_PEER, nullptr);  // no authority is known: only the key lets anybody in
  constexpr unsigned char kContext[] = "kvtier peer";
  SSL_CTX_set_session_id_context(contexts_->server, kContext, sizeof(kContext) - 1);
  SSL_CTX_set_ex_data(contexts_->server, SessionsIndex(), const_cast<PeerSessions*>(sessions));
  SSL_CTX_set_psk_find_session_callback(contexts_->server, FindSession);
  SSL_CTX_set_psk_use_session_callback(contexts_->client, UseSession);
}
PeerTls::~PeerTls() = default;

std::unique_ptr<PeerTransport> PeerTls::Server(int fd) {
  return std::make_unique<Tls>(contexts_->server, fd, true, std::nullopt);
}
std::unique_ptr<PeerTransport> PeerTls::Client(int fd, const PeerSession& session, const PeerKey& key) {
  return std::make_unique<Tls>(contexts_->client, fd, false, ClientIdentity{session, key});
}

}  // namespace kvtier
