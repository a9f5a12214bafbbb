#pragma once
/// `tessera tune`: the fastest way of every matrix product that a configuration's training makes.

#include <functional>
#include <string>
#include <vector>

#include "tessera/base/env.hpp"
#include "tessera/ops/tuning.hpp"

namespace tessera {

struct Config;

/// Where this user's tuned products are kept if nobody names a file; empty without a home.
std::string default_gemm_table(const Environment& environment);
/// Files in which training looks for tuned products: the user's, then those that came with Tessera (*.txt in
/// gemm_tables beside the library, or in share/tessera/gemm_tables of the installation).
std::vector<std::string> gemm_tables(const Environment& environment);

/// The matrix products that ranks of the layout make in a training step on `device`, each once: what one rank
/// of every kind asks for in a dry run of a few micro-batches with one layer in each piece of the model
/// (layers are alike). Counts are of these. Errors: ConfigError as build_engine.
std::vector<ops::RecordedProduct> products_of(const Config& config, Device device);

using OnProduct = std::function<void(const ops::RecordedProduct&, const ops::ProductTrial&)>;
/// Searches for the fastest way of each and keeps it in the file `output`, which is written after every one:
/// what it holds already is not timed again, so an interrupted search goes on where it ended. Returns how
/// many were timed. Errors: ConfigError in a build without CUDA, IoError if the file cannot be written.
std::int64_t tune_products(ExecCtx ctx, const std::vector<ops::RecordedProduct>& products,
                           const std::string& output, const OnProduct& on_product);

}  // namespace tessera
