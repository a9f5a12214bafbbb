/// Real processes over Gloo, and what happens to the others when one is killed, stopped or fails.

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>

#include "tests/comm/conformance.hpp"
#include "tests/comm/gloo_support.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {
namespace {

using Clock = std::chrono::steady_clock;
using RankMain = std::function<std::string(int rank, std::shared_ptr<Store> store)>;

/// Forked processes, each of which says "ready" and later one last word. Rank 0 may serve the store.
class Processes {
 public:
  /// All are forked before a thread is started; then they are told the store's port.
  Processes(int size, bool rank0_serves, const RankMain& main) : served_by_rank0_(rank0_serves) {
    std::array<int, 2> start{};
    EXPECT_EQ(::pipe(start.data()), 0);
    for (int rank = 0; rank < size; ++rank) {
      std::array<int, 2> pipe{};
      EXPECT_EQ(::pipe(pipe.data()), 0);
      const pid_t pid = ::fork();
      if (pid == 0) {
        if (::read(start[0], &port_, sizeof port_) == sizeof port_) run(rank, pipe[1], main);
        ::_exit(1);
      }
      ::close(pipe[1]);
      pids_.push_back(pid);
      pipes_.push_back(pipe[0]);
    }
    server_ = std::make_unique<StoreServer>("127.0.0.1", 0, "secret");
    port_ = server_->port();
    if (rank0_serves) server_.reset();
    for (int rank = 0; rank < size; ++rank)
      EXPECT_EQ(::write(start[1], &port_, sizeof port_), static_cast<ssize_t>(sizeof port_));
    ::close(start[0]);
    ::close(start[1]);
  }
  ~Processes() {
    for (const pid_t pid : pids_) ::kill(pid, SIGKILL);
    for (const pid_t pid : pids_) ::waitpid(pid, nullptr, 0);
    for (const int pipe : pipes_) ::close(pipe);
  }
  void wait_ready() {
    for (const int pipe : pipes_) {
      std::array<char, 5> word{};
      ASSERT_EQ(::read(pipe, word.data(), 5), 5);
    }
  }
  void signal(int rank, int number) const { ::kill(pids_[static_cast<std::size_t>(rank)], number); }
  pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  /// Until the process closes its end.
  std::string last_word(int rank) const {
    std::string text;
    std::array<char, 512> piece{};
    for (ssize_t got = 0;
         (got = ::read(pipes_[static_cast<std::size_t>(rank)], piece.data(), piece.size())) > 0;)
      text.append(piece.data(), static_cast<std::size_t>(got));
    return text;
  }

 private:
  [[noreturn]] void run(int rank, int pipe, const RankMain& main) {
    ready_pipe = pipe;
    std::string word;
    try {
      std::unique_ptr<StoreServer> server;
      if (served_by_rank0_ && rank == 0) server = std::make_unique<StoreServer>("127.0.0.1", port_, "secret");
      word = main(rank, std::make_shared<Store>("127.0.0.1", port_, "secret", 20));
    } catch (const std::exception& error) {
      word = error.what();
    }
    [[maybe_unused]] const ssize_t written = ::write(pipe, word.data(), word.size());
    ::_exit(0);
  }

 public:
  static int ready_pipe;
  static void say_ready() { [[maybe_unused]] const ssize_t written = ::write(ready_pipe, "ready", 5); }

 private:
  bool served_by_rank0_;
  std::uint16_t port_ = 0;
  std::unique_ptr<StoreServer> server_;
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
};

int Processes::ready_pipe = -1;

/// All-reduces until something happens.
RankMain reduce_for_ever(int size, double timeout_s, std::int64_t elements) {
  return [=](int rank, std::shared_ptr<Store> store) -> std::string {
    const auto comm =
        make_gloo_communicator(std::move(store), rank, size, {.comm = {.timeout_s = timeout_s}});
    const auto group = comm->split(0, rank, "everybody");
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    const Tensor x = Tensor::empty(ctx, {elements}, DType::f32);
    std::memset(x.raw(), 0, x.nbytes());
    group->all_reduce(ctx, x).wait(ctx);
    Processes::say_ready();
    for (;;) group->all_reduce(ctx, x).wait(ctx);
  };
}

void expect_names_the_lost(const std::string& message, const Processes& processes, int rank) {
  EXPECT_TRUE(contains(message, "all_reduce ")) << message;
  EXPECT_TRUE(contains(message, "group everybody")) << message;
  EXPECT_TRUE(contains(message, "rank " + std::to_string(rank) + " (host ")) << message;
  EXPECT_TRUE(contains(message, "process " + std::to_string(processes.pid(rank)) + ")")) << message;
  EXPECT_TRUE(contains(message, "gloo_process_test.cpp:")) << message;
}

/// In the middle of a message: the tensor is large.
TEST(GlooProcesses, AKilledRankIsNamedAtOnce) {
  Processes processes(3, false, reduce_for_ever(3, 60, 3000000));
  processes.wait_ready();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto begin = Clock::now();
  processes.signal(1, SIGKILL);
  for (const int rank : {0, 2}) {
    const std::string message = processes.last_word(rank);
    expect_names_the_lost(message, processes, 1);
    EXPECT_TRUE(contains(message, "lost the connection to rank 1 (")) << message;
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
}

TEST(GlooProcesses, AlsoIfItServedTheStore) {
  Processes processes(3, true, reduce_for_ever(3, 60, 1000));
  processes.wait_ready();
  const auto begin = Clock::now();
  processes.signal(0, SIGKILL);
  for (const int rank : {1, 2}) expect_names_the_lost(processes.last_word(rank), processes, 0);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
}

TEST(GlooProcesses, AStoppedRankIsNamedAtTheDeadline) {
  Processes processes(3, false, reduce_for_ever(3, 0.5, 1000));
  processes.wait_ready();
  processes.signal(2, SIGSTOP);
  const auto begin = Clock::now();
  for (const int rank : {0, 1}) {
    const std::string message = processes.last_word(rank);
    expect_names_the_lost(message, processes, 2);
    EXPECT_TRUE(contains(message, "did not finish within 0.5 s")) << message;
    EXPECT_TRUE(contains(message, "does not answer")) << message;
    EXPECT_FALSE(contains(message, "has not called it")) << message;
  }
  EXPECT_GT(Clock::now() - begin, std::chrono::milliseconds(400));
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(6));
}

TEST(GlooProcesses, AlsoIfItServesTheStore) {
  Processes processes(2, true, reduce_for_ever(2, 0.5, 1000));
  processes.wait_ready();
  processes.signal(0, SIGSTOP);
  const auto begin = Clock::now();
  expect_names_the_lost(processes.last_word(1), processes, 0);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));  // of the deadline, as of every hung rank
}

/// What a rank leaves under its error key is what the others end with.
TEST(GlooProcesses, ARanksOwnErrorReachesTheOthers) {
  const RankMain main = [](int rank, std::shared_ptr<Store> store) -> std::string {
    if (rank == 1) {
      try {
        const auto comm = make_gloo_communicator(store, rank, 3, {.comm = {.timeout_s = 60}});
        Processes::say_ready();
        throw DataError("corpus.idx is damaged");
      } catch (const DataError& error) {
        store->set(error_key("0", 1), std::string("rank 1: ") + error.what());
        return error.what();
      }
    }
    return reduce_for_ever(3, 60, 5)(rank, store);
  };
  const auto begin = Clock::now();
  Processes processes(3, false, main);
  for (const int rank : {0, 2}) {
    const std::string message = processes.last_word(rank);
    EXPECT_TRUE(contains(message, "rank 1: corpus.idx is damaged")) << message;
    EXPECT_TRUE(contains(message, "split 0 on group world")) << message;
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(8));
}

TEST(GlooProcesses, AnExceptionEndsTheOthersWithoutItsText) {
  const RankMain main = [](int rank, std::shared_ptr<Store> store) -> std::string {
    if (rank != 1) return reduce_for_ever(2, 60, 5)(rank, store);
    const auto comm = make_gloo_communicator(store, rank, 2, {.comm = {.timeout_s = 60}});
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    const Tensor x = Tensor::empty(ctx, {5}, DType::f32);
    const Pending unfinished = comm->all_reduce(ctx, x);  // the other rank does not call this
    throw DataError("corpus.idx is damaged");
  };
  const auto begin = Clock::now();
  Processes processes(2, false, main);
  const std::string message = processes.last_word(0);
  EXPECT_TRUE(contains(message, "rank 1 (host ")) << message;
  EXPECT_TRUE(contains(message, "ended with an exception")) << message;
  EXPECT_EQ(processes.last_word(1), "corpus.idx is damaged");
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
}

/// Ranks that end at different times do not disturb those that still work.
TEST(GlooProcesses, AnOrderlyEndDisturbsNobody) {
  const RankMain main = [](int rank, std::shared_ptr<Store> store) -> std::string {
    auto comm = make_gloo_communicator(std::move(store), rank, 3, {.comm = {.timeout_s = 60}});
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    Tensor x = tensor_of(ctx, DType::f32, {1.0});
    comm->all_reduce(ctx, x).wait(ctx);
    const auto pair = comm->split(rank == 0 ? -1 : 0, rank, "pair");
    if (rank == 0) return "done";
    comm.reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 has gone by now
    for (int i = 0; i < 20; ++i) pair->all_reduce(ctx, x).wait(ctx);
    return read_values(x)[0] == 3.0 * (1 << 20) ? "done" : "wrong sum";
  };
  Processes processes(3, true, main);
  for (const int rank : {0, 1, 2}) EXPECT_EQ(processes.last_word(rank), "done");
}

TEST(GlooProcesses, ARankThatNeverArrivesIsNamed) {
  const auto server = std::make_unique<StoreServer>("127.0.0.1", 0, "secret");
  std::string message;
  std::thread rank1([&] {
    message = message_of<CommunicationError>([&] {
      make_gloo_communicator(std::make_shared<Store>("127.0.0.1", server->port(), "secret", 5), 1, 3,
                             {.comm = {.timeout_s = 0.3}});
    });
  });
  rank1.join();
  EXPECT_TRUE(contains(message, "these ranks have not come: 0, 2")) << message;
}

TEST(GlooProcesses, AnAddressThatIsNotOurs) {
  const StoreServer server("127.0.0.1", 0, "secret");
  const auto store = std::make_shared<Store>("127.0.0.1", server.port(), "secret", 5);
  for (const char* address : {"192.0.2.7", "no such name"}) {
    const std::string message = message_of<IoError>(
        [&] { make_gloo_communicator(store, 0, 1, {.comm = {.timeout_s = 5}, .address = address}); });
    EXPECT_TRUE(contains(message, address)) << message;
    EXPECT_TRUE(contains(message, "TESSERA_COMM_ADDRESS")) << message;
  }
}

}  // namespace
}  // namespace tessera::test
