#pragma once
/// HTTP: connections, limits, keys. What is asked and answered is others' business.

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::cli::serving {

struct HttpCall {
  std::string method, path, body;
  std::function<bool()> gone;  ///< whether the client has closed its connection
};

/// Sends a piece; false if the client is gone.
using Write = std::function<bool(std::string_view)>;

struct HttpReply {
  int status = 200;
  std::string body = {};                          ///< JSON
  std::function<void(const Write&)> stream = {};  ///< instead of a body: server-sent events
};

struct HttpOptions {
  std::string host;
  int port = 0;
  std::string api_key;  ///< empty: none is asked for, and only clients that call this machine by its own
                        ///< name are answered
  std::size_t max_body = 0;
  int connections = 0;  ///< served at once; others wait
};

class HttpServer {
 public:
  using Handler = std::function<HttpReply(const HttpCall&)>;

  /// Listens, and answers by `handler`, called on several threads, which may throw BadRequest. Errors:
  /// IoError where it cannot listen.
  HttpServer(const HttpOptions& options, Handler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  /// Accepts no more connections; those that are served go on to the end of their request.
  void close();
  /// Calls that are being answered.
  int open_calls() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether `host` is this machine and nothing else.
bool is_loopback(const std::string& host);

}  // namespace tessera::cli::serving
