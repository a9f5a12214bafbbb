#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>

#include "cli/serve/service.hpp"
#include "cli/signal_handlers.hpp"
#include "tessera/comm/bytes.hpp"

namespace tessera::cli {
namespace {

using namespace serving;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// What signals asked for: an end. The server goes on to the end of what is under way; a second Ctrl-C ends
/// it at once.
std::atomic<int> ends_asked = 0;
static_assert(std::atomic<int>::is_always_lock_free);

void ask_to_end(int signal_number) {
  if (ends_asked.fetch_add(1) > 0 && signal_number == SIGINT) _exit(128 + SIGINT);
}

/// How long rank 0 waits for requests before it shows the others that it is there.
constexpr milliseconds kIdle{200};
constexpr std::size_t kMegabyte = std::size_t{1} << 20;

struct ServeArguments : ModelArguments {
  std::string host = "127.0.0.1", api_key_file, name;
  int port = 8000, connections = 128;
  std::int64_t batch_size = 32, queue = 512, max_prompt = 0, prefill_chunk = 512;
  std::size_t max_body = 4 * kMegabyte;
  double grace_s = 10;
  bool any_mode = false;
};

std::string read_key(const std::string& path, bool any_mode) {
  std::ifstream in(path);
  TESSERA_ENSURE(IoError, in, "cannot read ", path, ", the file of --api_key_file");
  const auto mode = static_cast<unsigned>(std::filesystem::status(path).permissions()) & 0777;
  TESSERA_ENSURE(ConfigError, any_mode || (mode & 077) == 0, path, " can be read by others: chmod 600 ", path,
                 "; where the mode is given, as with a mounted Kubernetes secret, --allow_secret_mode");
  std::string key, more;
  std::getline(in, key);
  while (!key.empty() && (key.back() == '\r' || key.back() == ' ')) key.pop_back();
  TESSERA_ENSURE(ConfigError,
                 key.size() >= 16 && key.find(' ') == std::string::npos && !std::getline(in, more), path,
                 " must hold one line, a key of at least 16 characters without spaces");
  return key;
}

std::string name_of(const ServeArguments& a) {
  if (!a.name.empty()) return a.name;
  return std::filesystem::weakly_canonical(a.model).filename().string();
}

std::function<std::uint64_t()> seeds() {
  auto source = std::make_shared<std::pair<std::mutex, std::random_device>>();
  return [source] {
    const std::lock_guard lock(source->first);
    return (std::uint64_t{source->second()} << 32) ^ source->second();
  };
}

/// Rank 0: the server, and what it asks of all ranks.
class Server {
 public:
  Server(const ServeArguments& a, ContinuousGenerator& generator, Texts& texts, std::int64_t positions,
         const std::string& key)
      : a_(a),
        generator_(generator),
        desk_(a.queue, [&generator](const TextRequest& request) { generator.check(request); }),
        service_{desk_, texts, name_of(a), a.max_prompt > 0 ? std::min(a.max_prompt, positions) : positions,
                 seeds()},
        http_({a.host, a.port, key, a.max_body, a.connections},
              [this](const HttpCall& call) { return respond(service_, call); }) {
    std::cerr << "serving " << service_.model << " on http://"
              << (a.host.find(':') == a.host.npos ? a.host : "[" + a.host + "]") << ":" << http_.port()
              << std::endl;
  }

  ~Server() {
    // Where computing has failed nobody else would tell those who wait.
    desk_.close();
    desk_.abandon("the server has failed");
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Until a signal comes, and what is under way has ended.
  void run() {
    bool ending = false, abandoned = false, busy = false;
    Clock::time_point last;
    while (true) {
      if (!ending && ends_asked > 0) {
        ending = true;
        last = Clock::now() +
               std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(a_.grace_s));
        desk_.close();
        http_.close();
      }
      if (ending && !abandoned && Clock::now() > last) {
        abandoned = true;
        desk_.abandon("the server was shut down");
      }
      if (ending && desk_.texts() == 0 && http_.open_calls() == 0) break;
      // While a client reads the rest of its answer there is nothing to compute.
      auto orders = desk_.take(busy ? milliseconds(0) : ending ? milliseconds(10) : kIdle);
      auto round = generator_.round(orders);
      busy = round.busy;
      if (round.noted) ask_to_end(SIGTERM);
      desk_.deliver(std::move(round.news));
    }
    generator_.round({.requests = {}, .cancelled = {}, .end = true});
  }

 private:
  const ServeArguments& a_;
  ContinuousGenerator& generator_;
  Desk desk_;
  Service service_;
  HttpServer http_;
};

void serve(const ServeArguments& a, const Program& program, const std::string& key,
           const std::shared_ptr<Communicator>& world) {
  ends_asked = 0;
  // Before the model is read, so that an end that is asked for meanwhile is not forgotten.
  SignalHandlers signals({{SIGINT, ask_to_end}, {SIGTERM, ask_to_end}});
  const LoadedModel loaded = load(a, program, world);
  std::shared_ptr<Tokenizer> tokenizer;
  if (world->rank() == 0) tokenizer = open_tokenizer(loaded, a, program);
  const TextEnds ends = text_ends(loaded, a, tokenizer.get(), *world);
  ContinuousGenerator generator(*loaded.engine,
                                {.batch_size = a.batch_size, .prefill_chunk = a.prefill_chunk});
  if (world->rank() != 0) {
    while (!generator.round({}, ends_asked > 0).end) continue;
  } else {
    Texts texts(tokenizer, ends);
    const Model& model = loaded.engine->model();
    Server(a, generator, texts, ends.encodes ? model.position_limit() : model.max_positions(), key).run();
  }
  if (program.environment.launched()) signals.ignore_late_ones();
}

void run_serve(const ServeArguments& a, Program& program) {
  TESSERA_ENSURE(ConfigError, a.port >= 0 && a.port <= 65535,
                 "--port must be between 0 (any free one) and 65535, not ", a.port);
  TESSERA_ENSURE(
      ConfigError,
      a.connections >= 1 && a.batch_size >= 1 && a.queue >= 1 && a.prefill_chunk >= 1 && a.max_body >= 1,
      "--max-connections, --batch-size, --max-queue, --prefill-chunk and --max-body must be 1 or more");
  TESSERA_ENSURE(ConfigError, a.max_prompt >= 0 && a.grace_s >= 0,
                 "--max-prompt and --grace must not be negative");
  const std::string key = a.api_key_file.empty() ? "" : read_key(a.api_key_file, a.any_mode);
  TESSERA_ENSURE(ConfigError, !key.empty() || is_loopback(a.host), "--host ", a.host,
                 " lets other machines ask: give --api_key_file FILE with a key that clients must send");
  on_layout(a, program, [&](const std::shared_ptr<Communicator>& world) { serve(a, program, key, world); });
}

}  // namespace

void add_serve(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("serve", "Answer requests for texts over HTTP: OpenAI's and Megatron's");
  auto a = std::make_shared<ServeArguments>();
  add_model(*command, *a);
  const auto add = [command](const char* name, auto& value, const char* help) {
    command->add_option(name, value, help)->capture_default_str();
  };
  add("--port", a->port, "to listen on; 0 = any free one, which is told on stderr");
  add("--host", a->host, "address to listen on; one that other machines reach needs --api_key_file");
  command->add_option("--api_key_file,--api-key-file", a->api_key_file,
                      "file with a key that clients send: Authorization: Bearer KEY");
  command->add_flag("--allow_secret_mode,--allow-secret-mode", a->any_mode,
                    "take a file of a key that others can read");
  command->add_option("--name", a->name, "the model's name for clients; by default its folder's");
  add("--batch-size", a->batch_size, "texts computed at once by a data rank; others wait");
  add("--max-queue", a->queue, "texts computed or waiting; more are refused with 429");
  add("--max-prompt", a->max_prompt, "tokens of a prompt; 0 = the model's positions");
  add("--max-body", a->max_body, "bytes of a request");
  add("--max-connections", a->connections, "connections served at once; others wait");
  add("--prefill-chunk", a->prefill_chunk, "positions of a prompt computed at once");
  add("--grace", a->grace_s, "seconds for what is under way when the server is asked to end");
  command->callback([a, &program] { run_serve(*a, program); });
}

}  // namespace tessera::cli
