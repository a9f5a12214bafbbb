#include "engine/profiler.hpp"

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "engine/ranks.hpp"
#include "engine/throughput.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/config.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/bytes.hpp"

namespace tessera {
namespace {

void write_profile(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.flush();
  TESSERA_ENSURE(IoError, out.good(), "cannot write ", path.string());
}

std::string rate_text(double rate, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof text, "%.4g G%s", rate / 1e9, unit);
  return text;
}

}  // namespace

Profiler::Profiler(const Config& config, Engine& engine, Communicator& world, double flops_per_s)
    : folder_(config.logging.dir + "/profile"),
      first_(config.logging.profile.at(0)),
      stop_(config.logging.profile.at(1)),
      engine_(engine),
      world_(world),
      rates_{flops_per_s, measure_copy_rate(engine.ctx())} {
  engine.ctx().allocator->trim();
}

void Profiler::before_step(std::int64_t step) {
  if (trace_ || step < first_ || step >= stop_) return;
  trace_ = std::make_shared<Trace>(*engine_.ctx().stream);
  // Ranks count time from a moment they share, as clocks of two hosts have nothing in common.
  world_.barrier(host_);
  origin_s_ = now_s();
  engine_.set_trace(trace_);
}

void Profiler::add_step(const TimedStep& step) {
  if (trace_) steps_.push_back(step);
}

std::optional<std::string> Profiler::after_step(std::int64_t step, bool ends) {
  if (!trace_ || (step + 1 != stop_ && !ends)) return std::nullopt;
  engine_.set_trace(nullptr);
  std::string text;
  on_every_rank(host_, world_, [&] { text = report(); });
  trace_ = nullptr;
  std::string all;
  for (const std::string& rank : all_gather_bytes(world_, text)) all += (all.empty() ? "" : "\n") + rank;
  if (world_.rank() == 0) write_profile(folder_ + "/steps.txt", all);
  return text;
}

std::string Profiler::report() const {
  const std::vector<TraceLane> lanes = trace_->lanes();
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  TESSERA_ENSURE(IoError, !error, "cannot make the folder ", folder_, ": ", error.message());
  write_profile(folder_ + "/trace_rank" + std::to_string(world_.rank()) + ".json",
                trace_json(lanes, steps_, world_.rank(), origin_s_));
  const StepTable table = make_step_table(lanes.front(), steps_, rates_);
  return title(table) + text_of(table);
}

std::string Profiler::title(const StepTable& table) const {
  return detail::concat("Steps ", steps_.empty() ? first_ : steps_.front().step, " to ",
                        steps_.empty() ? first_ : steps_.back().step, ", rank ", world_.rank(), " of ",
                        world_.size(), ", on ", engine_.ctx().device(), "; means of ", table.steps,
                        " steps. Floors: products at ", rate_text(rates_.flops_per_s, "FLOP/s"), " (",
                        name_of(engine_.options().compute), "), memory at ",
                        rate_text(rates_.bytes_per_s, "B/s"), ", both measured here.\n\n");
}

}  // namespace tessera
