#pragma once
/// What commands share that compute with a trained model on a layout: `generate` and `evaluate`.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/run_path.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/data/tokenizer.hpp"

namespace tessera::cli {

struct ModelArguments {
  std::string model, tokenizer;
  std::vector<std::string> overrides;
  std::int64_t threads = 0;
};

/// The arguments' options on the command line.
void add_model(CLI::App& command, ModelArguments& a);

/// This process's part of the model.
LoadedModel load(const ModelArguments& a, const Program& program, const std::shared_ptr<Communicator>& world);

/// "bytes", or where a tokenizer lies.
TokenizerOptions tokenizer_named(const std::string& name);

/// What is named by --tokenizer, recorded with the weights, or configured, in this order.
TokenizerOptions tokenizer_options(const LoadedModel& loaded, const std::string& given);

/// Ids mean nothing without the tokenizer that made them: another one is refused, a guess is told of.
std::unique_ptr<Tokenizer> open_tokenizer(const LoadedModel& loaded, const ModelArguments& a,
                                          const Program& program);

/// Runs `work` on as many processes as the layout needs, which are started here unless this is one of them.
void on_layout(const ModelArguments& a, Program& program,
               const std::function<void(const std::shared_ptr<Communicator>&)>& work);

}  // namespace tessera::cli
