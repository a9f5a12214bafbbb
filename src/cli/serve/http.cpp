#include "cli/serve/http.hpp"

#include <httplib.h>
#include <netdb.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <thread>
#include <utility>

#include "cli/serve/fields.hpp"

namespace tessera::cli::serving {
namespace {

constexpr int kReadSeconds = 30, kWriteSeconds = 30, kKeepAliveSeconds = 5;

using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;

Digest digest_of(const std::string& text) {
  Digest digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

/// In a time that tells nothing of the key, nor of its length.
bool is_key(const std::string& given, const std::string& key) {
  const Digest a = digest_of(given), b = digest_of(key);
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

bool comes_from(int socket, const httplib::Request& request) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return false;
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host.data(), host.size(), port.data(),
                  port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return false;
  return request.remote_addr == host.data() && std::to_string(request.remote_port) == port.data();
}

/// The connection of a request that is being answered, which the library does not tell: among this process's
/// own. -1 if there is none.
int socket_of(const httplib::Request& request) {
  std::error_code unread;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", unread)) {
    const int socket = std::atoi(entry.path().filename().c_str());
    if (comes_from(socket, request)) return socket;
  }
  return -1;
}

bool is_closed(int socket) {
  pollfd place{socket, POLLRDHUP, 0};
  return socket >= 0 && poll(&place, 1, 0) > 0;
}

/// The name of a Host header, without its port.
std::string name_of(const std::string& host) {
  if (host.starts_with('[')) return host.substr(1, host.find(']') - 1);
  return host.substr(0, host.find(':'));
}

class OpenCall {
 public:
  explicit OpenCall(std::atomic<int>& count) : count_(count) { ++count_; }
  ~OpenCall() { --count_; }
  OpenCall(const OpenCall&) = delete;
  OpenCall& operator=(const OpenCall&) = delete;

 private:
  std::atomic<int>& count_;
};

/// The library's stop() would also cut off what is still being answered.
class ListeningServer : public httplib::Server {
 public:
  void stop_listening() { shutdown(svr_sock_, SHUT_RDWR); }
};

/// Answers are given whole: the library would cut parts out of them unchecked, and read past their end. The
/// request is a variable of its process_request(), which hands it out as const.
void ignore_ranges(const httplib::Request& request) { const_cast<httplib::Request&>(request).ranges.clear(); }

/// All of a body, so that the next request of the connection is found behind it. Errors: BadRequest.
std::string read_body(const httplib::Request& request, const httplib::ContentReader& read, std::size_t most) {
  std::string body;
  std::size_t size = 0;
  const auto take = [&](const char* data, std::size_t count) {
    size += count;
    if (size > most) return false;
    body.append(data, count);
    return true;
  };
  if (!request.has_header("Content-Length") && !request.has_header("Transfer-Encoding"))
    throw BadRequest{411, "the body is missing, or the header Content-Length"};
  if (request.is_multipart_form_data()) {
    read([](const auto&) { return true; }, take);  // versions differ in the name of a part of a form
    return "";
  }
  const bool whole = read(take);
  const std::string length = request.get_header_value("Content-Length");
  if (size > most || (!whole && std::strtoull(length.c_str(), nullptr, 10) > most))
    throw BadRequest{413, detail::concat("the body is larger than ", most, " bytes, see --max-body")};
  if (!whole) throw BadRequest{400, "the body ended before its end, or is not encoded as its header says"};
  return body;
}

}  // namespace

bool is_loopback(const std::string& host) {
  // No name that only begins as such an address does.
  const bool is_address = host.find_first_not_of("0123456789.") == std::string::npos;
  return host == "localhost" || host == "::1" || (is_address && host.starts_with("127."));
}

struct HttpServer::State {
  HttpOptions options;
  Handler handler;
  ListeningServer server = {};
  std::atomic<int> open = 0;
  int port = 0;
  bool closed = false;
  std::thread thread = {};

  void admit(const httplib::Request& request) const {
    if (options.api_key.empty()) {
      // A page in a browser of this machine could otherwise ask by a name of its own that leads here.
      if (request.has_header("Host") && !is_loopback(name_of(request.get_header_value("Host"))))
        throw BadRequest{403, "this server answers to localhost alone: start it with --api_key_file"};
      return;
    }
    if (request.path == "/health") return;
    const std::string given = request.get_header_value("Authorization");
    if (!given.starts_with("Bearer ") || !is_key(given.substr(7), options.api_key))
      throw BadRequest{401, "the key is missing or wrong: send Authorization: Bearer KEY"};
  }

  using Call = std::shared_ptr<OpenCall>;  ///< until the last byte of its answer is written

  void answer(const httplib::Request& request, httplib::Response& response, std::string body,
              const Call& call) {
    const int socket = socket_of(request);
    HttpReply reply =
        handler({request.method, request.path, std::move(body), [socket] { return is_closed(socket); }});
    if (!reply.stream) return send(response, reply.status, std::move(reply.body), call);
    response.status = reply.status;
    response.set_header("Cache-Control", "no-cache");
    response.set_chunked_content_provider("text/event-stream", [stream = std::move(reply.stream), socket,
                                                                call](std::size_t, httplib::DataSink& sink) {
      bool lost = false;
      stream([&](std::string_view piece) {
        lost = lost || is_closed(socket) || (!piece.empty() && !sink.write(piece.data(), piece.size()));
        return !lost;
      });
      if (!lost) sink.done();
      return !lost;
    });
  }

  void serve(const httplib::Request& request, httplib::Response& response,
             const httplib::ContentReader* read) {
    const auto call = std::make_shared<OpenCall>(open);
    ignore_ranges(request);
    try {
      std::string body = read != nullptr ? read_body(request, *read, options.max_body) : "";
      admit(request);
      const std::string type = request.get_header_value("Content-Type");
      if (read != nullptr && !type.starts_with("application/json"))
        throw BadRequest{415, "send JSON, with the header Content-Type: application/json"};
      answer(request, response, std::move(body), call);
    } catch (const BadRequest& bad) {
      refuse(response, bad, call);
    } catch (const std::exception& error) {
      refuse(response, {500, error.what()}, call);
    }
  }

  static void send(httplib::Response& response, int status, std::string body, const Call& call) {
    response.status = status;
    const std::size_t size = body.size();
    response.set_content_provider(
        size, "application/json",
        [body = std::move(body), call](std::size_t offset, std::size_t length, httplib::DataSink& sink) {
          return offset < body.size() &&
                 sink.write(body.data() + offset, std::min(length, body.size() - offset));
        });
  }

  static void refuse(httplib::Response& response, const BadRequest& bad, const Call& call) {
    if (bad.status == 401) response.set_header("WWW-Authenticate", "Bearer");
    if (bad.status == 429 || bad.status == 503) response.set_header("Retry-After", "1");
    send(response, bad.status, error_body(bad), call);
  }

  void set_up() {
    const auto plain = [this](const httplib::Request& request, httplib::Response& response) {
      serve(request, response, nullptr);
    };
    const auto with_body = [this](const httplib::Request& request, httplib::Response& response,
                                  const httplib::ContentReader& read) { serve(request, response, &read); };
    server.Get(".*", plain).Delete(".*", plain).Options(".*", plain);
    server.Post(".*", with_body).Put(".*", with_body).Patch(".*", with_body);
    server.set_error_handler([](const httplib::Request&, httplib::Response& response) {
      if (response.has_header("Content-Type")) return;  // ours
      refuse(response, {response.status, "this is no request that can be answered"}, nullptr);
    });
    server.new_task_queue = [this] {
      return new httplib::ThreadPool(static_cast<std::size_t>(options.connections));
    };
    server.set_payload_max_length(options.max_body);
    server.set_read_timeout(kReadSeconds);
    server.set_write_timeout(kWriteSeconds);
    server.set_keep_alive_max_count(std::size_t{1} << 20);
    server.set_keep_alive_timeout(kKeepAliveSeconds);
    server.set_tcp_nodelay(true);
    // Another server on the port is an error, and one that has just ended none.
    server.set_socket_options([](int socket) {
      const int yes = 1;
      setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    });
  }

  /// Connections on which nothing is asked would be waited for.
  void end_idle() {
    std::error_code unread;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", unread)) {
      const int socket = std::atoi(entry.path().filename().c_str());
      sockaddr_storage own{};
      socklen_t size = sizeof(own);
      if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) != 0) continue;
      const in_port_t at = own.ss_family == AF_INET    ? reinterpret_cast<sockaddr_in*>(&own)->sin_port
                           : own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&own)->sin6_port
                                                       : 0;
      if (ntohs(at) == port) shutdown(socket, SHUT_RD);
    }
  }
};

HttpServer::HttpServer(const HttpOptions& options, Handler handler)
    : state_(new State{.options = options, .handler = std::move(handler)}) {
  State& state = *state_;
  state.set_up();
  if (options.port == 0) {
    state.port = state.server.bind_to_any_port(options.host);
  } else if (state.server.bind_to_port(options.host, options.port)) {
    state.port = options.port;
  }
  TESSERA_ENSURE(IoError, state.port > 0, "cannot listen on ", options.host, ":", options.port,
                 ": another program has the port, or this machine has no such address");
  state.thread = std::thread([&state] { state.server.listen_after_bind(); });
  // A server that does not run yet cannot be closed.
  while (!state.server.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

HttpServer::~HttpServer() {
  close();
  state_->end_idle();
  state_->thread.join();
}

int HttpServer::port() const { return state_->port; }
void HttpServer::close() {
  if (!std::exchange(state_->closed, true)) state_->server.stop_listening();
}
int HttpServer::open_calls() const { return state_->open; }

}  // namespace tessera::cli::serving
